"""Conversations on disk, and their training samples for supervised fine-tuning.

    stream = rollout.Shuffled(data.Conversations("chats.jsonl"), seed=0)
    sample = data.training_sample(stream.draw(), tokenizer, max_tokens=4096)

The streams of ``rollout`` shuffle and mix conversations, and save and restore the position. This
package does not load torch.
"""

from primerl.data.chat_templates import marked_text, training_sample
from primerl.data.conversations import Conversations
from primerl.data.errors import ConversationError
from primerl.data.left_out import LeftOut

__all__ = ["ConversationError", "Conversations", "LeftOut", "marked_text", "training_sample"]
