"""Command lines; they run as they lie here, and are installed as megatron.tools."""
