"""Model cards, one Markdown file per model family, installed as the data package `hf_compile_model_cards`."""
