"""As vLLM for CPU: a platform that needs no device."""


class Cpu:
    def is_unspecified(self):
        return False


current_platform = Cpu()
