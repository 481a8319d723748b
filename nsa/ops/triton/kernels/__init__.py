"""Only @triton.jit functions; launching them is the business of the modules beside this folder."""
