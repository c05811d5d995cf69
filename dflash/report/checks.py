"""Whether a run can be trusted: one plain verdict for each way in which such runs have misled people.

Every check is computed from the evidence itself, not from what a stage says of itself, wherever the evidence allows. A
check that cannot be made says so and never counts as passed. Costs nothing beside what `gather` has read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash.base.words import number_of
from dflash.report.evidence import Evidence
from dflash.report.tables import TauTable, verdict

Standing = Literal["holds", "look", "fails", "unknown"]
LABELS: dict[str, str] = {"holds": "Holds", "look": "Look", "fails": "Fails", "unknown": "Not known"}
NONE_NEEDED = "none needed"
MOST_TRUNCATED = 0.2
"""Above this share of completions cut at the length limit the check asks for a look, whatever the config allows."""


@dataclass(frozen=True)
class Check:
    """One check.

    name: its anchor on the page; words: the verdict in a sentence, with its numbers; details: files and reasons, or
    further facts.
    """

    name: str
    title: str
    standing: Standing
    words: str
    details: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The verdict in one or two words."""
        return LABELS[self.standing]


def all_checks(evidence: Evidence, tables: Sequence[TauTable]) -> list[Check]:
    """All checks, those that decide most first."""
    return [
        receipts(evidence),
        kernels(evidence),
        baselines(tables),
        *([lossless(evidence)] if evidence.params("evaluate").get("online") else []),
        held_out(
            evidence.shared_prompts, evidence.dataset.unchecked_against_exclude if evidence.dataset is not None else 0
        ),
        truncated(evidence),
        code(evidence),
        adoptions(evidence),
        determinism(evidence),
    ]


def summary(checks: Sequence[Check]) -> str:
    """How many checks hold, and which do not."""
    parts = []
    for standing, words in (("fails", "fails"), ("look", "needs a look"), ("unknown", "is not known")):
        named = [check.title.lower() for check in checks if check.standing == standing]
        if named:
            parts.append(f"{len(named)} {words if len(named) == 1 else _plural(words)} ({', '.join(named)})")
    held = sum(check.standing == "holds" for check in checks)
    return f"{held} of {len(checks)} checks hold" + (f"; {'; '.join(parts)}." if parts else ".")


def _plural(words: str) -> str:
    return {"fails": "fail", "needs a look": "need a look", "is not known": "are not known"}[words]


def _elsewhere(count: int) -> str:
    return "1 lies on another host and was" if count == 1 else f"{count:,} lie on other hosts and were"


def receipts(evidence: Evidence) -> Check:
    """Every result the run consists of has its receipt, and the files are those that it records."""
    audit = evidence.audit
    words = (
        f"{audit.found} of {audit.expected} receipts are there and valid; {number_of(audit.by_bytes, 'file has', 'files have')} "
        "the recorded bytes"
        + (f", {number_of(audit.by_size, 'large one')} the recorded size" if audit.by_size else "")
        + (f", {_elsewhere(audit.elsewhere)} not checked here" if audit.elsewhere else "")
    )
    details = tuple(f"{trouble.file}: {trouble.why}" for trouble in audit.troubles)
    title = "Receipts and files"
    if details:
        return Check("receipts", title, "fails", f"{words}. {number_of(len(details), 'does', 'do')} not hold.", details)
    return Check("receipts", title, "unknown" if not audit.expected else "holds", f"{words}.")


def flat(kernels: Mapping[str, Any]) -> dict[str, str]:
    """Nested facts under dotted names."""
    out: dict[str, str] = {}
    for name, value in kernels.items():
        if isinstance(value, Mapping):
            out.update({f"{name}.{inner}": text for inner, text in flat(value).items()})
        else:
            out[str(name)] = str(value)
    return out


def bound(kernels: Mapping[str, Any]) -> dict[str, str]:
    """The target's kernels, flat, whether a record holds them alone or under `target`."""
    target = kernels.get("target")
    return flat(target if isinstance(target, Mapping) else kernels)


def kernels(evidence: Evidence) -> Check:
    """The target's features were computed by the same functions in training and in evaluation."""
    title = "Kernels in training and evaluation"
    trained = [(f"step {step}", bound(item.kernels)) for step, item in evidence.checkpoints.items() if item.kernels]
    judged = _judging_kernels(evidence)
    if not trained or not judged:
        side = "training" if not trained else "evaluation"
        return Check("kernels", title, "unknown", f"No record says which kernels were bound in {side}.")
    first = trained[0][1]
    changed = [f"training at {where}: {line}" for where, item in trained[1:] for line in differences(first, item)]
    gaps = [f"evaluation on {where}: {line}" for where, item in judged for line in differences(first, item)]
    name = _name(first, "the recorded kernels")
    same = [where for where, item in judged if not differences(first, item)]
    if changed:
        return Check(
            "kernels", title, "fails", "The kernels changed in the middle of training.", tuple([*changed, *gaps][:20])
        )
    if not gaps:
        words = (
            "The target has no linear attention layers, and attention ran the same way in training and in evaluation."
            if name == NONE_NEEDED
            else f"Equal: training and evaluation both ran on {name}, function by function."
        )
        return Check("kernels", title, "holds", words)
    others = ", ".join(
        f"{where} with other functions" if where == name else where
        for where, item in judged
        if differences(first, item)
    )
    if same:
        words = f"Trained on {name} and judged on it, but also on others ({others}): compare the two tables of tau."
        return Check("kernels", title, "look", words, tuple(gaps[:20]))
    words = f"They differ: trained on {name}, judged on {others}. Part of what tau shows may be the kernels, not the drafter."
    return Check("kernels", title, "fails", words, tuple(gaps[:20]))


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """`name: a, b` for every fact that two descriptions of kernels do not share."""
    names = sorted(set(one) | set(other))
    return [
        f"{name} is {other.get(name, 'not recorded')}, in training {one.get(name, 'not recorded')}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _name(facts: Mapping[str, str], otherwise: str) -> str:
    """What a config calls kernels of these facts."""
    linear = facts.get("linear", otherwise)
    return "torch_recurrent" if linear == "torch" and facts.get("form") == "recurrent" else linear


def _judging_kernels(evidence: Evidence) -> list[tuple[str, dict[str, str]]]:
    """What was bound when the target wrote the continuations that drafters are judged on: one a `references` result."""
    found = []
    for entry in evidence.entries("references"):
        receipt = evidence.receipts.get((entry.name, None))
        environment = evidence.environments.get(receipt.environment) if receipt else None
        if environment and environment.kernels:
            asked = str(evidence.manifest.config.get(entry.name, {}).get("kernels") or entry.name)
            facts = bound(environment.kernels)
            found.append((_name(facts, asked), facts))
    return found


def baselines(tables: Sequence[TauTable]) -> Check:
    """A drafter that prompt lookup or a count n-gram table beats has shown nothing."""
    title = "Drafter against baselines"
    if not tables:
        return Check("baselines", title, "unknown", "No checkpoint has been evaluated.")
    verdicts = [(table, verdict(table)) for table in tables]
    standing_of: dict[str, Standing] = {"beats": "holds", "unclear": "look", "loses": "fails", "unknown": "unknown"}
    worst = next(
        level for level in ("loses", "unknown", "unclear", "beats") if level in {v.standing for _, v in verdicts}
    )
    told = [
        (f"On {table.prompt_set}, {table.kernel} kernels: " if len(tables) > 1 else "") + v.words
        for table, v in verdicts
    ]
    leading = next(index for index, (_, v) in enumerate(verdicts) if v.standing == worst)
    rest = tuple(text for index, text in enumerate(told) if index != leading)
    return Check("baselines", title, standing_of[worst], told[leading], rest)


def lossless(evidence: Evidence) -> Check:
    """Real decodes gave the target's own text, with the acceptance lengths that were worked out offline."""
    title = "Real decodes"
    rows = [row for row in evidence.rows if row["metric"] in ("lossless", "same_lengths_as_offline")]
    if not rows:
        return Check("lossless", title, "unknown", "No prompt was decoded greedily at the checkpoints that are shown.")
    wrong = [row for row in rows if row["value"] < 1]
    prompts = sum(int(row["n"]) for row in rows if row["metric"] == "lossless")
    if not wrong:
        words = (
            f"In all {prompts} decodes the text is the target's own, token for token, and every verification commits what was "
            "worked out offline."
        )
        return Check("lossless", title, "holds", words)
    words_of = {"lossless": "are the target's own text", "same_lengths_as_offline": "have the offline lengths"}
    told = tuple(
        f"step {row['step']}, {row['prompt_set']}, {row['kernel']} kernels, {row['method']}: {row['value']:.0%} of {row['n']} "
        f"{words_of[row['metric']]}"
        for row in wrong
    )
    exact = all(
        evidence.manifest.config.get(entry.name, {}).get("dtype") in ("float32", "float64")
        for entry in evidence.entries("references")
    ) and evidence.params("evaluate").get("dtype") in ("float32", "float64")
    words = "Some decodes differ from the target's own text or from the offline lengths" + (
        ", which exact arithmetic does not excuse."
        if exact
        else "; in a coarse type near ties turn, so look at how many."
    )
    return Check("lossless", title, "fails" if exact else "look", words, told)


def held_out(shared: Mapping[str, int] | None, unchecked: int = 0) -> Check:
    """No prompt that drafters are judged on was trained on. unchecked: samples of which only tokens are known."""
    title = "Held-out prompts"
    if shared is None:
        return Check("held_out", title, "unknown", "The prompts of training or of evaluation cannot be read.")
    both = {name: count for name, count in shared.items() if count}
    if both:
        told = ", ".join(f"{count} of {name}" for name, count in both.items())
        return Check(
            "held_out", title, "fails", f"Prompts that were also trained on: {told}. tau there is partly memory."
        )
    if unchecked:
        words = f"{unchecked:,} imported samples came without messages, so nobody can tell whether a judged prompt is among them."
        return Check("held_out", title, "unknown", words)
    names = ", ".join(shared)
    return Check("held_out", title, "holds", f"No prompt of {names} is among those trained on (compared by content).")


def truncated(evidence: Evidence) -> Check:
    """Completions cut at the length limit teach no ending."""
    title = "Truncated completions"
    counted: list[tuple[str, int, int]] = []
    for entry in evidence.entries("completions"):
        receipt = evidence.receipts.get((entry.name, None))
        total, cut = (receipt.results.get(name) for name in ("completions", "truncated")) if receipt else (None, None)
        if not isinstance(total, int) or not isinstance(cut, int):
            return Check("truncated", title, "unknown", f"No record says how the completions of {entry.name} ended.")
        counted.append((entry.name, total, cut))
    total, cut = sum(item[1] for item in counted), sum(item[2] for item in counted)
    if not total:
        return Check("truncated", title, "unknown", "No record says how completions ended.")
    details = tuple(f"{name}: {ends:,} of {count:,}" for name, count, ends in counted) if len(counted) > 1 else ()
    verb = "was" if cut == 1 else "were"
    words = f"{cut:,} of {number_of(total, 'completion')} ({cut / total:.1%}) {verb} cut at the length limit."
    return Check("truncated", title, "look" if cut / total > MOST_TRUNCATED else "holds", words, details)


def code(evidence: Evidence) -> Check:
    """The code that ran can be had again."""
    title = "Code"
    facts = evidence.manifest.git
    places = [("planning", facts)] + [(f"environment {name}", item.git) for name, item in evidence.environments.items()]
    dirty = [(where, item) for where, item in places if item.get("dirty")]
    commit = str(facts.get("commit") or "")
    kept = f" The exact code is kept as {evidence.manifest.code[:16]}." if evidence.manifest.code else ""
    if dirty:
        changed = sorted({str(name) for _, item in dirty for name in item.get("changed") or []})
        words = f"Uncommitted changes in the working tree on top of commit {commit[:12] or 'unknown'}.{kept}"
        return Check("code", title, "look", words, tuple(changed[:20]))
    commits = {str(item["commit"])[:12] for _, item in places if item.get("commit")}
    if len(commits) > 1:
        words = f"Results come from {len(commits)} commits; the keys say which code each stage ran."
        return Check("code", title, "holds", words, tuple(sorted(commits)))
    if not commit:
        words = f"Not run from a git checkout, so no commit is recorded.{kept}"
        return Check("code", title, "holds" if kept else "unknown", words)
    return Check("code", title, "holds", f"Commit {commit[:12]}, nothing uncommitted.")


def adoptions(evidence: Evidence) -> Check:
    """Results kept although the code that makes them has changed."""
    title = "Adopted results"
    listed = evidence.manifest.adoptions
    if not listed:
        return Check("adoptions", title, "holds", "None: every result was made by the code of its key.")
    told = tuple(", ".join(f"{name} {value}" for name, value in sorted(item.items())) for item in listed)
    words = (
        f"{number_of(len(listed), 'older result was', 'older results were')} kept after a change of code, by decision."
    )
    return Check("adoptions", title, "look", words, told)


def determinism(evidence: Evidence) -> Check:
    """What a repetition of this run would give."""
    meanings = {
        "bitwise": "Bitwise: a repetition in the same environment gives the same bytes.",
        "tolerance": "Tolerance: a repetition gives the same values within rounding, not the same bytes.",
        "statistical": "Statistical: a repetition agrees within the intervals only.",
    }
    kind = evidence.manifest.determinism
    return Check("determinism", "Repeatability", "holds" if kind == "bitwise" else "look", meanings[kind])
