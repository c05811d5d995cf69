"""The page: one file that needs nothing else, survives damage and hostile text, and can be read by everyone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from report_store import FLA_KERNELS, TORCH_KERNELS, Made, Story, make_run, rewrite_json

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import write_json
from dflash.base.stage import HostContext, Inputs
from dflash.evaluate.metrics import COLUMNS
from dflash.report.evidence import _tag_rows, gather
from dflash.report.figures import Series, bar_chart, line_chart, thin, tick_texts
from dflash.report.page import build, visible
from dflash.report.report import TEMPLATE, run
from dflash.report.report_params import ReportParams
from dflash.report.tables import tidy

VOID = {"meta", "link", "br", "path", "rect"}
TEMPLATE_PATH = Path(sys.modules[run.__module__].__file__ or "").parent / TEMPLATE


class Outline(HTMLParser):
    """Collects what the tests ask about: elements with attributes, text, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_run(tmp_path)


def test_the_page_loads_nothing(made: Made) -> None:
    page = made.report()
    outline = Outline(page)
    assert not outline.open
    assert not [tag for tag, _ in outline.elements if tag in {"script", "img", "iframe", "object", "embed", "base"}]
    for tag, attributes in outline.elements:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"url\(|@import|https?://", page)


def test_every_link_inside_the_page_has_its_target_and_no_id_stands_twice(made: Made) -> None:
    outline = Outline(made.report())
    names = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(names) == len(set(names))
    wanted = [str(link["href"])[1:] for link in outline.all("a")]
    wanted += [str(item["aria-labelledby"]) for _, item in outline.elements if "aria-labelledby" in item]
    assert set(wanted) <= set(names)


def test_two_hundred_evaluations_stay_under_a_megabyte_and_ten_seconds(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(steps=list(range(10, 2010, 10)), prompt_sets=("held_out", "chat")))
    start = time.process_time()
    page = made.report(samples=8)
    assert time.process_time() - start < 10
    assert len(page.encode()) < 1_000_000
    assert "20 of 200 steps" in page
    assert "All 200 steps" in page


def test_a_long_training_is_drawn_with_few_points_and_the_caption_says_so(made: Made) -> None:
    path = made.directory("train") / "metrics.jsonl"
    first = path.read_text().splitlines()[0]
    lines = [first.replace('"step":1,', f'"step":{step},') for step in range(1, 6001)]
    path.write_text("\n".join(lines))
    page = made.report()
    loss = page[page.index('aria-label="Loss.') :]
    drawn = re.search(r'class="line" d="([^"]*)"', loss)
    assert drawn is not None
    assert drawn[1].count("L") < 150
    assert "n = 6,000 steps; each point is the mean of 50 steps" in page


HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    story = Story(text=(HOSTILE, "\n", HOSTILE), adoptions=[{"stage": "train", "why": HOSTILE}])
    made = make_run(tmp_path, story)
    manifest = made.manifest
    manifest.config["train"]["target"]["revision"] = HOSTILE
    manifest.params_files["train"]["origins"]["lr"] = HOSTILE
    manifest.git["changed"], manifest.git["dirty"] = [HOSTILE], True
    manifest.write(made.manifest_path)
    evaluate = made.directory("evaluate")
    for step in story.steps:
        path = evaluate / f"step_{step}" / "rows.json"
        rewrite_json(path, lambda rows: [row | {"prompt_set": HOSTILE, "drafter": HOSTILE} for row in rows])
        rewrite_json(evaluate / f"step_{step}.json", lambda receipt: receipt | {"outputs": []})
    next(entry for entry in manifest.stages if entry.stage == "evaluate").receipts.clear()
    manifest.write(made.manifest_path)
    page = made.report(title=HOSTILE)
    outline = Outline(page)
    assert not [tag for tag, _ in outline.elements if tag in {"script", "img"}]
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    assert page.count("&lt;script&gt;") > 20
    assert HOSTILE in outline.text


def test_the_first_screen_says_what_ran_and_whether_to_trust_it(made: Made) -> None:
    text = Outline(made.report()).text
    assert (
        "A DFlash drafter of 2 layers (128,000 parameters) with block size 8, trained for 300 steps on 1,640 samples that the "
        "target wrote, for the hybrid target demo-1 (8 layers, hidden size 160); judged at 6 checkpoints."
    ) in text
    assert "8 of 8 checks hold." in text
    for words in (
        "tokens committed per verification, the bonus token included (+1)",
        "n = 184",
        "block size, 8",
        "95%",
    ):
        assert words in text


def test_kernels_that_differ_and_a_baseline_that_wins_stand_before_any_section(tmp_path: Path) -> None:
    page = make_run(tmp_path, Story(judge_kernels={"fla": FLA_KERNELS}, ngram=2.6)).report()
    top = page[: page.index("<main>")]
    assert "trained on torch, judged on fla" in top
    assert "does not beat n-gram (2.60)" in top


def test_every_figure_has_an_alternative_text_and_every_table_a_caption_and_scopes(made: Made) -> None:
    outline = Outline(made.report())
    figures = [item for item in outline.all("svg") if item.get("class") == "figure"]
    assert len(figures) == 8
    for item in figures:
        assert item["role"] == "img"
        assert len(str(item["aria-label"])) > 30
    tables = outline.all("table")
    assert len(tables) == len(outline.all("caption")) > 10
    assert all(item.get("scope") in {"col", "row"} for item in outline.all("th"))
    regions = [item for item in outline.all("div") if item.get("class") == "scroll"]
    assert len(regions) == len(tables)
    assert all(item["tabindex"] == "0" and item["role"] == "region" and item["aria-label"] for item in regions)
    labels = [item["aria-label"] for item in regions]
    assert len(labels) == len(set(labels))
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_accepted_drafts_are_marked_token_by_token_and_not_by_colour_alone(made: Made) -> None:
    page = made.report(samples=1)
    shown = page[page.index('aria-label="Continuation of held_out') :]
    shown = shown[: shown.index("</article>")]
    marks = re.findall(r"<([ubs])>", shown)
    assert marks.count("s") == 1
    accepted = re.search(r"of at most 7: ([0-9, ]+)\.", shown)
    assert accepted is not None
    counts = [int(count) for count in accepted[1].split(", ")]
    assert marks.count("u") == sum(counts)
    assert len(marks) == 48
    assert ".tokens u{" in page
    assert "border-bottom:2px solid" in page


def test_as_many_samples_are_shown_as_asked_for_taken_from_each_set_in_turn(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(prompt_sets=("chat", "maths")))
    assert re.findall(r'<h3 id="sample-\d">(\w+),', made.report(samples=3)) == ["chat", "maths", "chat"]
    assert "None to show" in made.report(samples=0)


def test_the_whole_configuration_stands_there_with_its_origins(made: Made) -> None:
    page = made.report()
    text = Outline(page).text
    for entry in made.manifest.stages:
        assert entry.key in text
    section = page[page.index("configuration of train") :]
    assert re.search(r'<th scope="row">lr</th><td>0.001</td><td>config/config.yaml:12</td>', section)
    assert re.search(r'<th scope="row">target.num_layers</th><td>8</td><td>derived</td>', section)
    assert "train: 37 values, 1 set for this run" in text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forget_field(path: Path) -> None:
    rewrite_json(path, lambda value: {name: item for name, item in value.items() if name != "samples"})


def test_rows_by_tag_without_a_step_are_damage_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "tags.json"
    path.write_text('[{"tag": "code", "value": 3}]')
    with pytest.raises(CorruptError, match="step"):
        _tag_rows(path)


@pytest.mark.parametrize(
    ("stage", "file", "damage"),
    [
        ("train", "metrics.jsonl", Path.unlink),
        ("train", "metrics.jsonl", lambda path: path.write_text("not json\n{}\n")),
        ("train", "step_100/manifest.json", cut),
        ("train", "step_100/manifest.json", lambda path: rewrite_json(path, lambda m: m | {"schema_version": 9})),
        ("evaluate", "step_300/samples.json", Path.unlink),
        ("evaluate", "step_300/samples.json", cut),
        ("evaluate", "step_300/samples.json", lambda path: path.write_text('[{"id": 3}]')),
        ("evaluate", "step_200/rows.json", cut),
        ("evaluate", "step_200/rows.json", lambda path: path.write_text('[{"value": 3}]')),
        ("evaluate", "step_200.json", cut),
        ("dataset", "dataset.json", cut),
        ("dataset", "dataset.json", forget_field),
        ("dataset", "train.parquet", cut),
        ("buckets", "buckets.json", Path.unlink),
        ("buckets", "buckets.json", forget_field),
        ("references/torch", "references.parquet", cut),
        ("references/torch", "receipt.json", cut),
    ],
)
@pytest.mark.parametrize("disowned", [True, False])
def test_damaged_evidence_is_named_where_it_is_missed_and_the_page_still_comes(
    made: Made, stage: str, file: str, damage: Callable[[Path], object], disowned: bool
) -> None:
    directory = made.directory(stage)
    path = directory / file
    damage(path)
    if not disowned:  # the damage was there before the receipt: reading itself must notice
        for receipt in [*directory.glob("receipt.json"), *directory.glob("step_*.json"), *directory.glob("receipts/*")]:
            if receipt != path:
                rewrite_json(receipt, lambda value: value | {"outputs": []})
        for entry in made.manifest.stages:
            entry.receipts.clear()
        made.manifest.write(made.manifest_path)
    text = Outline(made.report()).text
    assert str(path.relative_to(made.store)) in text
    assert "Traceback" not in text
    assert (made.workdir / "evaluations.csv").exists()


def test_a_run_with_no_results_at_all_still_makes_a_page(made: Made) -> None:
    shutil.rmtree(made.store)
    page = made.report()
    assert "No checkpoint of this run has been evaluated." in page
    assert "0 of 17 receipts are there" in page
    assert (made.workdir / "evaluations.csv").read_text().startswith("run,train_key,step")


def test_no_path_of_the_machine_reaches_the_page(made: Made) -> None:
    (made.directory("buckets") / "buckets.json").unlink()
    (made.directory("dataset") / "train.parquet").write_bytes(b"no parquet")
    assert str(made.store) not in made.report()


def test_a_manifest_that_cannot_be_read_is_an_error_that_names_it(made: Made) -> None:
    cut(made.manifest_path)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        made.report()


def test_without_its_places_the_stage_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="'manifest'"):
        run(ReportParams(run="demo"), Inputs({}), tmp_path, HostContext())


def test_reporting_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, dflash.report.report; "
        "sys.exit([name for name in ('torch', 'matplotlib', 'transformers') if name in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---- colours


def luminance(colour: str) -> float:
    full = "".join(letter * 2 for letter in colour[1:]) if len(colour) == 4 else colour[1:]
    parts = [int(full[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_has_contrast_4_5_and_lines_have_3_in_every_theme(theme: str) -> None:
    blocks = re.findall(r":root\{([^}]*)\}", TEMPLATE_PATH.read_text())
    colours = dict(
        re.findall(r"--(\w+):(#[0-9a-f]{3,6})", dict(zip(("light", "dark", "print"), blocks, strict=True))[theme])
    )
    for ground in ("bg", "panel"):
        for name in ("text", "muted", "link", "good", "warn", "bad", "unknown"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["text"], colours["tint"]) >= 4.5
    for index in range(1, 7):
        assert contrast(colours[f"s{index}"], colours["bg"]) >= 3, index


# ---- figures


def test_a_point_lies_where_the_axis_says() -> None:
    svg = line_chart("t", [Series("a", [(0, 0.0), (10, 4.0)])], x_label="step", y_label="y")
    ticks = {text: float(y) for y, text in re.findall(r'<text class="tick" x="41" y="([\d.]+)"[^>]*>([\d.]+)<', svg)}
    path = re.search(r'class="line" d="M[\d.]+ ([\d.]+)L[\d.]+ ([\d.]+)"', svg)
    assert path is not None
    assert [float(y) + 4 for y in path.groups()] == pytest.approx([ticks["0"], ticks["4"]], abs=0.2)


def test_an_alternative_text_tells_ends_and_extremes() -> None:
    svg = line_chart("tau by step", [Series("chain", [(1, 1.0), (2, 3.0), (3, 2.0)])], x_label="step", y_label="tau")
    assert "tau by step. chain: 1 at step 1, 2 at step 3, between 1 and 3." in svg


@pytest.mark.parametrize("points", [[(5, 2.0)], [(5, 2.0), (9, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (2, 1e9)]])
def test_flat_single_and_wild_curves_are_drawn(points: list[tuple[float, float]]) -> None:
    svg = line_chart("t", [Series("a", points, [None] * len(points))], x_label="x", y_label="y")
    assert "nan" not in svg
    assert "inf" not in svg
    assert len(re.findall(r'class="tick"', svg)) < 20


def test_ticks_of_steps_and_slots_are_whole_numbers() -> None:
    svg = line_chart("t", [Series("a", [(1, 0.1), (2, 0.2), (3, 0.3)])], x_label="slot", y_label="y")
    assert re.findall(r'y="213"[^>]*>([^<]*)<', svg) == ["1", "2", "3"]


def test_control_characters_are_written_out() -> None:
    assert visible("a\x1b[31m\x00\n\t\u200bé") == "a\\x1b[31m\\x00\n\t\\u200bé"


def test_nothing_to_draw_is_no_figure() -> None:
    assert line_chart("t", [Series("a", [])], x_label="x", y_label="y") == ""
    assert bar_chart("t", [], [], x_label="x", y_label="y") == ""


def test_thinning_keeps_the_mean_and_the_number_of_points() -> None:
    points = [(float(index), float(index % 7)) for index in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:5], 100) == points[:5]


def test_ticks_of_one_axis_are_written_alike() -> None:
    assert tick_texts([0, 5000, 10000, 20000]) == ["0", "5k", "10k", "20k"]
    assert tick_texts([0, 0.0005, 0.001]) == ["0", "5e-4", "1e-3"]
    assert tick_texts([1, 1.5, 2]) == ["1", "1.5", "2"]


def test_real_decodes_have_a_table_and_stay_out_of_tau_by_step(tmp_path: Path) -> None:
    text = Outline(make_run(tmp_path, Story(lossless=1.0)).report()).text
    assert "Prompts decoded for real at step 300" in text
    assert "demo, torch" not in text
    assert "held_out, torch chain greedy 2.20 [1.00, 2.40] 1.60 [1.00, 2.40] 1.00 [1.00, 2.40]" in text
    assert "n = 184 requests" in text
    assert "n = 4 to 184" not in text


def test_another_drafter_is_a_column_and_a_line_of_tau_by_step_under_its_label(tmp_path: Path) -> None:
    label = "theirs [taps 1 4; target unknown]"
    story = Story(extra=[{"drafter": label, "value": 1.93, "ci_low": 1.9, "ci_high": 1.96}])
    page = make_run(tmp_path, story).report()
    outline = Outline(page)
    assert f"chain ({label})" in outline.text
    assert "1.93 [1.90, 1.96]" in outline.text
    (figure,) = [item for item in outline.all("svg") if "tau by step" in str(item.get("aria-label"))]
    assert f"chain ({label}): 1.93" in str(figure["aria-label"])


def test_two_kernels_stand_side_by_side_with_the_interval_of_their_difference(tmp_path: Path) -> None:
    gap = {"kernel": "fla-torch", "metric": "tau_difference", "value": 0.012, "ci_low": -0.004, "ci_high": 0.03}
    same = {"kernel": "fla-torch", "metric": "same_continuation", "value": 0.95}
    story = Story(judge_kernels={"torch": TORCH_KERNELS, "fla": FLA_KERNELS}, extra=[gap, same])
    text = Outline(make_run(tmp_path, story).report()).text
    assert "+0.012 [-0.004, +0.030]" in text
    assert "Both continue 95.0% of the requests alike." in text


def test_kernels_that_differ_between_training_and_evaluation_are_the_first_thing_read(tmp_path: Path) -> None:
    page = make_run(tmp_path, Story(judge_kernels={"fla": FLA_KERNELS})).report()
    body = page[page.index("<body>") :]
    assert body.index("trained on torch, judged on fla") < body.index("<nav")


# ---- what came with evidence: shipments, the parent dataset, hosts, rates


def test_shipments_are_told_with_size_rate_and_whether_they_were_verified(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    assert "Nothing was shipped" in Outline(made.report()).text
    for step, verified in ((250, True), (300, False)):
        record = {"bytes": 3_500_000_000, "seconds": 35.0, "bytes_per_second": 1e8, "verified": verified, "files": 2}
        write_json(
            made.store / "ship" / made.directory("train").name / "judge" / f"step_{step}.json", {"shipment": record}
        )
    text = Outline(made.report()).text
    assert "2 shipments, 7 GB in 70 s, 100 MB/s on average; 1 of 2 verified byte by byte" in text
    assert "train step 300 ? to judge 3.5 GB 35 s 100 MB/s NO" in text


def test_a_damaged_record_of_a_shipment_is_named(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    write_json(
        made.store / "ship" / made.directory("train").name / "judge" / "step_300.json", {"shipment": {"bytes": "many"}}
    )
    assert "judge/step_300.json" in made.report()


def test_lengths_are_drawn_against_the_dataset_of_the_state_before(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    assert "against the dataset" not in made.report()
    before = make_run(tmp_path / "before", Story(batching={"seed": 3}))
    old = before.directory("buckets")
    shutil.copytree(old, made.store / "buckets" / old.name)
    rewrite_json(
        made.store / "buckets" / old.name / "buckets.json",
        lambda document: (
            document | {"samples": 410, "tokens": 41_000, "histogram": {"edges": [0, 128, 256], "counts": [410, 0]}}
        ),
    )
    earlier = before.manifest.model_copy(update={"created": "2025-12-01T00:00:00.000+00:00", "runkey": "ba9876543210"})
    earlier.write(tmp_path / "runs/demo/ba9876543210/manifest.json")
    html = made.report()
    assert "against the dataset of the state before (ba9876543210, 2025-12-01), n = 410" in html
    assert "mean length 100.0 then, 91.5 now" in html
    # 16 bars of 8 tokens each hold a sixteenth of what the parent has up to 128 tokens
    assert re.search(r"parent: 1-8 6\.2", html)


def test_the_first_screen_tells_throughput_by_role_and_hosts_are_told_by_environment(tmp_path: Path) -> None:
    html = make_run(tmp_path).report()
    head = html[: html.index("<main>")]
    assert re.search(
        r"Throughput by role, median of 300 steps: drafter 1[34],\d{3} tokens/s, target 2[01],\d{3} tokens/s", head
    )
    assert "environments by host" in html.lower()


def test_steps_of_an_epoch_are_a_whole_number_and_its_time_is_told_in_a_unit_that_fits(made: Made) -> None:
    evidence = gather(made.manifest, made.store)
    evidence.metrics = [line.model_copy(update={"tokens": 1000, "seconds": 1.0}) for line in evidence.metrics]
    frame = tidy(evidence.rows, "demo")
    for steps, tokens, told in (
        (44.0, 2_000_000, ("an epoch, 44 steps; ", " an epoch takes 33.3 min.")),
        (44.25, 64, ("an epoch, about 44 steps; ", " an epoch takes 0.06 s.")),
        (0.75, 2_000_000_000, ("an epoch, about 1 step; ", " an epoch takes 555.6 h.")),
    ):
        assert evidence.buckets is not None
        evidence.buckets = evidence.buckets.model_copy(update={"steps_per_epoch": steps, "tokens": tokens})
        words = build(evidence, frame, ReportParams(run="demo"), created="").bucket_words
        assert all(part in words for part in told), words
    assert re.search(
        r"in \d+\.\d min of step time", build(evidence, frame, ReportParams(run="demo"), created="").training_words
    )


def test_a_page_of_two_hundred_evaluations_stays_under_two_megabytes(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(steps=list(range(5, 1005, 5))))
    for step in made.manifest.steps:
        record = {"bytes": 3_500_000_000, "seconds": 35.0, "bytes_per_second": 1e8, "verified": True}
        write_json(
            made.store / "ship" / made.directory("train").name / "judge" / f"step_{step}.json", {"shipment": record}
        )
    started = time.monotonic()
    html = made.report()
    assert len(html.encode()) < 2_000_000
    assert time.monotonic() - started < 60


def test_tau_by_tag_has_a_table_and_a_csv_of_its_own(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain")
    plain.report()
    made = make_run(tmp_path / "tagged", Story(tags={"short": 6, "code": 30, "<b>": 12}))
    page = made.report()
    assert "tau by tag" not in plain.report()
    start = page.index("tau by tag of the prompts, step 300; prompt set held_out")
    table = page[start : page.index("</table>", start)]
    assert [table.index(text) for text in ("code", "&lt;b&gt;", "6 (few)")] == sorted(
        table.index(text) for text in ("code", "&lt;b&gt;", "6 (few)")
    ), "tags of most requests first"
    assert "30 (few)" not in table
    assert "<b>" not in table
    assert (made.workdir / "evaluations.csv").read_bytes() == (plain.workdir / "evaluations.csv").read_bytes()
    frame = pd.read_csv(made.workdir / "evaluations_by_tag.csv")
    assert list(frame.columns) == [*COLUMNS, "tag"]
    assert set(frame["tag"]) == {"short", "code", "<b>"}
    assert set(frame["step"]) == set(made.manifest.steps)
    assert list(frame["step"]) == sorted(frame["step"])
    assert not (plain.workdir / "evaluations_by_tag.csv").exists()


def test_many_tags_are_cut_to_those_of_most_requests_and_the_caption_says_so(tmp_path: Path) -> None:
    page = make_run(tmp_path, Story(tags={f"kind-{number:02d}": 100 - number for number in range(23)})).report()
    assert "3 more tags stand in evaluations_by_tag.csv" in page
    assert "kind-19" in page
    assert "kind-20" not in page


def test_damaged_rows_by_tag_are_named_and_the_rest_of_the_page_still_comes(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(tags={"code": 5}))
    path = made.directory("evaluate") / "step_300" / "tags.json"
    path.write_text(path.read_text().replace("code", "cods"))
    page = made.report()
    assert "step_300/tags.json" in page
    assert "tau by step" in page
