"""The Hugging Face hub: pushing a run's model, its model card, the base model and licence that the card names."""
