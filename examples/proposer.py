#!/usr/bin/env python3
"""A proposer for `flashcore evolve --proposer`: a hill climber that needs nothing but Python.

It reads one JSON object (the brief) on standard input and answers with one on standard output;
docs/src/reference/proposers.md says what is in them. It starts from the fastest plan in its input and changes
one gene to a value nearby. Every fourth answer is a whole kernel: the incumbent's PTX with another bound on
its registers, so that more CTAs fit on a multiprocessor. Replace `propose` by a question to a language model
and the rest can stay.
"""

import json
import random
import re
import sys


def plan_of(candidate):
    """The GPU plan of a candidate, or None."""
    return candidate.get("gpu") if isinstance(candidate, dict) else None


def nearby(value, seen):
    """Values that a gene might have instead of this one: half, twice, a step; or whatever it had in other plans."""
    others = [other for other in seen if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        step = 16 if value >= 32 and value % 16 == 0 else 1
        others += [n for n in (value // 2, value * 2, value - step, value + step) if 0 < n != value]
    return others


def change_a_gene(plan, plans, rng):
    """The plan with one gene changed, and the gene; not one that was tried already."""
    tried = {json.dumps(p, sort_keys=True) for p in plans}
    genes = [gene for gene in plan if gene != "family"]
    for _ in range(100):
        gene = rng.choice(genes)
        seen = [p[gene] for p in plans if p.get("family") == plan.get("family") and gene in p]
        values = nearby(plan[gene], seen)
        if not values:
            continue
        changed = dict(plan, **{gene: rng.choice(values)})
        if json.dumps(changed, sort_keys=True) not in tried:
            return changed, gene
    return None, None


def bound_registers(source, ctas):
    """The PTX with room for so many CTAs on a multiprocessor, or None where its entry says no number of threads."""
    if ".minnctapersm" in source or not re.search(r"\.(reqntid|maxntid) [0-9, ]+", source):
        return None
    return re.sub(r"(\.(?:reqntid|maxntid) [0-9, ]+)", rf"\g<1>\n.minnctapersm {ctas}\n", source, count=1)


def propose(brief, rng):
    history = brief.get("history") or []
    incumbent = brief.get("incumbent") or {}
    timed = [entry for entry in history if entry.get("us") and plan_of(entry["candidate"])]
    plans = [plan_of(entry["candidate"]) for entry in history if plan_of(entry["candidate"])]
    us, best = incumbent.get("us"), plan_of(incumbent.get("candidate") or {})
    for entry in timed:
        if us is None or entry["us"] < us:
            us, best = entry["us"], plan_of(entry["candidate"])
    if len(history) % 4 == 3 and incumbent.get("source") and incumbent.get("launch"):
        ctas = 2 + len(history) // 4 % 3  # another one each time
        text = bound_registers(incumbent["source"], ctas)
        if text:
            why = f"room for {ctas} CTAs on a multiprocessor: one computes while the other waits"
            return {"ptx": text, "launch": incumbent["launch"], "hypothesis": why, "predicted_us": us}
    if best is None:
        sys.exit("no plan to begin with")
    plan, gene = change_a_gene(best, plans + [best], rng)
    if plan is None:
        sys.exit("every plan nearby was tried")
    why = f"{gene} {json.dumps(plan[gene])} instead of {json.dumps(best[gene])}, all else as in the fastest plan so far"
    return {"plan": plan, "hypothesis": why, "predicted_us": us}


def main():
    brief = json.load(sys.stdin)
    # Equal briefs get equal answers; the history grows with each.
    rng = random.Random(json.dumps(brief.get("history"), sort_keys=True))
    answer = propose(brief, rng)
    json.dump({key: value for key, value in answer.items() if value is not None}, sys.stdout)


if __name__ == "__main__":
    main()
