"""Multi-rank training: strategies (DDP, FSDP), their process group, and hang diagnosis."""
