"""What a run reads: architecture, tokenizer, rows and batches."""
