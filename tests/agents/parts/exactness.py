"""A check of samples against what an engine saw and sampled, independent of how they were made."""

import numpy as np


def inexact(requests, samples, *, cuts=False):
    """Return one line for each deviation from training every sampled token exactly once.

    ``requests`` are the engine's pairs of prompt ids and completion. Versions must differ between
    them, so that a version tells which of them sampled a token. With ``cuts``, the end of a reply
    may be left out.
    """
    faults = []
    trained = [np.flatnonzero(sample.loss_mask) for sample in samples]
    explained = [np.zeros(len(sample.token_ids), bool) for sample in samples]
    for number, (prompt, completion) in enumerate(requests):
        found = 0
        begin = len(prompt)
        whole = np.concatenate([np.asarray(prompt), completion.token_ids])
        for sample, known in zip(samples, explained, strict=True):
            count = trained_from(sample, begin, completion)
            if count < (1 if cuts else len(completion.token_ids)):
                continue
            end = begin + count
            if not np.array_equal(sample.token_ids[:end], whole[:end]):
                faults.append(f"request {number} is trained after other tokens than it saw")
            logprobs = np.asarray(completion.logprobs[:count], np.float32)
            if not np.array_equal(sample.behavior_logprobs[begin:end], logprobs):
                faults.append(f"request {number} is trained with other logprobs than sampled")
            known[begin:end] = True
            found += 1
        if found != 1:
            faults.append(f"the reply to request {number} is trained {found} times")
    for index, (positions, known) in enumerate(zip(trained, explained, strict=True)):
        if not known[positions].all():
            faults.append(f"sample {index} trains tokens that no request sampled")
    return faults


def trained_from(sample, begin, completion):
    """Return how many tokens of a completion, from its first one, a sample trains at ``begin``."""
    most = min(len(completion.token_ids), len(sample.token_ids) - begin)
    if most < 1:
        return 0
    end = begin + most
    same = sample.versions[begin:end] == completion.versions[:most]
    agree = same & sample.loss_mask[begin:end]
    return most if agree.all() else int(np.argmin(agree))
