"""A short sample at the end of a run, so that a person sees what the model has learned.

Every token costs a whole forward pass over the window: no cache. Good for a few lines, not for
serving.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxseek.data.tokenizer import TextTokenizer
from jaxseek.train.state import Program, TrainState
from jaxseek.train.step import make_logits


def sample_text(
    program: Program,
    state: TrainState,
    *,
    tokenizer: TextTokenizer,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.7,
) -> str:
    """`prompt` and up to `num_tokens` sampled tokens after it; ends early at the end-of-sentence
    token.

    Runs on the run's own mesh and layout. Ids that the tokenizer does not have are never sampled.
    """
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)][: program.run.seq_len]
    window = min(len(ids) + num_tokens, program.run.seq_len)
    next_logits = make_logits(program)
    tokens = np.zeros((1, window), np.int32)
    tokens[0, : len(ids)] = ids
    key = jax.random.key(program.run.seed)
    for position in range(len(ids), window):
        logits = np.array(next_logits(state, jnp.asarray(tokens), jnp.int32(position - 1))[0])
        logits[tokenizer.vocab_size :] = -np.inf
        choice = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
        tokens[0, position] = int(choice)
        if int(choice) == tokenizer.eos_id:
            break
        ids.append(int(choice))
    return tokenizer.decode(ids[1:])
