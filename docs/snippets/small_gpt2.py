"""Makes a small GPT-2 with random weights, whose tokens are bytes, in target/small-gpt2."""

# ANCHOR: make
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_head=4, n_layer=4, bos_token_id=None, eos_token_id=None)
GPT2LMHeadModel(config).save_pretrained("target/small-gpt2")
# ANCHOR_END: make
