"""What a trained model does: perplexity by position and context, the needle grid, lm-eval tasks."""
