"""Parts of the acoustic-model example: synthesis, features, labels, model and decoder."""
