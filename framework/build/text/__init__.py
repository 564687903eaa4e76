"""From rows to tokens and labels: row formats, chat templates, tokenizer."""
