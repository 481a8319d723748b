"""Many ranks: strategies (DDP, FSDP), their process group, and hang diagnosis."""
