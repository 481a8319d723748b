"""The torch path: any device, any dtype, trainable, memory linear in the sequence length."""
