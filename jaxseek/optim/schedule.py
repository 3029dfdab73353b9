"""Learning-rate schedules. The clock is optimizer steps that were applied; micro-batches never
count.
"""

import optax

from jaxseek.run_config import OptimConfig

# DeepSeek LLM (arXiv:2401.02954) and DeepSeekMoE drop the rate by this factor at each of two points
# of the run.
MULTI_STEP_FACTOR = 0.316


def learning_rate_schedule(optim: OptimConfig, *, steps: int) -> optax.Schedule:
    """Rate of update number n (from 0) of a run of `steps` updates.

    Update n of the warm-up has (n + 1) / warmup of the peak, so the first one already moves; the
    last update of a cosine run has `final_fraction` of the peak.
    """
    peak, warmup = optim.learning_rate, optim.resolved_warmup(steps)
    first = max(warmup - 1, 0)  # the update that has the full rate
    match optim.schedule:
        case "cosine":
            decay_steps = max(steps - 1 - first, 1)
            main = optax.cosine_decay_schedule(peak, decay_steps, alpha=optim.final_fraction)
        case "constant":
            main = optax.constant_schedule(peak)
        case "multi_step":
            drops: dict[int, float] = {}
            for at in optim.multi_step_at:  # both may fall on one update of a short run
                update = round(at * steps) - first
                drops[update] = drops.get(update, 1.0) * MULTI_STEP_FACTOR
            main = optax.piecewise_constant_schedule(peak, drops)
    if warmup <= 1:
        return main
    rise = optax.linear_schedule(peak / warmup, peak, transition_steps=first)
    return optax.join_schedules([rise, main], boundaries=[first])
