"""The api process of the embedded engine: OpenAI HTTP, tokenizer, request ledger. No torch."""
