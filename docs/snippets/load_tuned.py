"""Loads the model that finetune has left."""

# ANCHOR: load
from transformers import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained("target/finetune/hugging_face")
# ANCHOR_END: load
