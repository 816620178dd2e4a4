# PYTHON_ARGCOMPLETE_OK
"""pretrain_gpt2.py of Megatron-LM's first release (2019): runs pretrain_gpt.py."""

from pretrain_gpt import main

if __name__ == "__main__":
    main()
