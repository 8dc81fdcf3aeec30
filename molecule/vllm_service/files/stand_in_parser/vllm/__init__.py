"""The stand-in's parser, where vLLM has its own; the real one is asked in tests/unit and in long_upgrade."""
