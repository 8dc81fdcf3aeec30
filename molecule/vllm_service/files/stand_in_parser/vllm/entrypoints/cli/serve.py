"""The ``serve`` command of the stand-in."""

import os
import pwd
from pathlib import Path

FLAGS = ("model", "served-model-name", "host", "port", "max-model-len", "stand-in", "stand-in-load")


class Serve:
    name = "serve"

    def subparser_init(self, commands):
        parser = commands.add_parser(self.name)
        for flag in FLAGS:
            parser.add_argument(f"--{flag}")
        return parser

    def validate(self, arguments):
        if arguments.stand_in == "tell":
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            raise ValueError(
                f"user {pwd.getpwuid(os.getuid()).pw_name}, "
                f"no new privileges {status.partition('NoNewPrivs:')[2].split()[0]}, "
                f"/etc writable {os.access('/etc', os.W_OK)}, of generation {os.environ['ONPREM_VLLM_GENERATION']}, "
                f"key {os.environ['VLLM_API_KEY']}"
            )


def cmd_init():
    return [Serve()]
