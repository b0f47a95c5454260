//! The sections of the page of a climb.

use maud::{Markup, html};
use predict::Cause;

use super::chart::{Bar, Part, Point, bars, roofline, short, stacked};
use super::listing::listing;
use check::diagnose::show_lines;
use check::gate::Verdict;
use climb::{Climb, Climbed};

/// The measured time, or why there is none.
fn measured(rung: &Climbed) -> String {
    let failure = || rung.measured.as_ref().and_then(|m| m.failure.clone());
    rung.measured_us().map(short).or_else(failure).unwrap_or("–".into())
}

/// The result of the climb in a few sentences, from its own figures.
pub(super) fn learnt(climb: &Climb) -> Markup {
    let passed = || climb.rungs.iter().filter(|r| r.study.check.verdict == Verdict::Passed);
    let failed: Vec<&str> = climb
        .rungs
        .iter()
        .filter(|r| r.study.check.verdict == Verdict::Failed)
        .map(|r| r.rung.name.as_str())
        .collect();
    let timed = || passed().filter_map(|r| Some((r, r.us()?)));
    let fastest = timed().min_by(|a, b| a.1.total_cmp(&b.1));
    let first = climb.rungs.first().and_then(|r| Some((r, r.us()?)));
    html! {
        p {
            (passed().count()) " of " (climb.rungs.len()) " versions of the kernel pass the check. "
            @if let (Some((fastest, us)), Some((first, from))) = (fastest, first) {
                "The fastest of them, " b { (fastest.rung.name) } ", takes " (short(us)) " µs"
                @if climb.card.is_none() { " (predicted)" }
                ", " b { (format!("{:.0}", from / us)) " times as fast" } " as the first, " (first.rung.name) ". "
                @if let Some(p) = fastest.study.prediction() { "What bounds it now: " (p.bound.name()) ". " }
            }
            @if let [.., last] = failed.as_slice() {
                "Wrong kernels, however fast: " (failed[..failed.len() - 1].join(", "))
                @if failed.len() > 1 { " and " } (last) "."
            }
        }
    }
}

/// The columns of the table of versions, and what each means.
const COLUMNS: [(&str, &str); 10] = [
    ("version", "a kernel, in the order in which the original kernels were written; the last two are ours"),
    ("verdict", "of the check in the emulator: passed, failed or incomplete"),
    (
        "max_diff",
        "the largest difference of one run from the oracle rounded to the element type, as the original kernels' log gives it",
    ),
    (
        "error / allowed",
        "the error of the worst run, and what standard attention in the input precision would be allowed; this decides, with the hazards. NaN: some run gave NaN where the oracle is finite",
    ),
    ("predicted µs", "the time of the time model"),
    ("measured µs", "the time on the GPU of this machine, if there is one"),
    (
        "quoted µs",
        "the time in the log of the original kernels, on an NVIDIA L4; some are of a batch of two, all predictions of one",
    ),
    ("×", "how many times as fast as the first version"),
    ("bound", "the resource that limits the kernel"),
    ("first root cause", "what costs most time; all causes are below"),
];

/// The quoted time, marked where it is of a batch of two.
fn quoted(rung: &climb::Rung) -> Markup {
    html! {
        (rung.quoted_us().map_or("–".into(), short))
        @if let Some(batch) = rung.quoted.as_ref().map(|quoted| quoted.batch).filter(|batch| *batch > 1) {
            br; span.soft { "for a batch of " (batch) }
        }
    }
}

pub(super) fn progress(climb: &Climb) -> Markup {
    let first = climb.rungs.first().and_then(Climbed::us);
    html! {
        div.scroll { table.stacks {
            thead { tr {
                th { "version" } th { "verdict" } th.n { "max_diff" } th.n { "error / allowed" } th.n { "predicted µs" }
                @if climb.card.is_some() { th.n { "measured µs" } }
                th.n { "quoted µs" } th.n { "×" } th { "bound" } th { "first root cause" }
            } }
            tbody { @for rung in &climb.rungs {
                @let check = &rung.study.check;
                tr {
                    td { b { (rung.rung.name) } br; span.soft { (rung.rung.story) } }
                    td class=(format!("verdict {}", check.verdict)) { (check.verdict) }
                    td.n data-label="max_diff" { (check.error.map_or("–".into(), |e| format!("{:.6}", e.max_diff))) }
                    td.n data-label="error / allowed" { (check.error.map_or("–".into(), |e| e.brief())) }
                    td.n data-label="predicted µs" { (rung.predicted_us().map_or("–".into(), short)) }
                    @if climb.card.is_some() { td.n data-label="measured µs" { (measured(rung)) } }
                    td.n data-label="quoted µs" { (quoted(&rung.rung)) }
                    td.n data-label="×" { (first.zip(rung.us()).map_or("–".into(), |(f, u)| format!("{:.1}", f / u))) }
                    td data-label="bound" { (rung.study.prediction().map_or("–".into(), |p| p.bound.name().to_owned())) }
                    td data-label="first root cause" { (rung.study.findings.first().map_or("–", |f| f.name.name())) }
                }
            } }
        } }
        (small_and_wrong(climb))
        details {
            summary { "What the columns mean" }
            dl {
                @for (name, meaning) in COLUMNS {
                    @if name != "measured µs" || climb.card.is_some() { dt { (name) } dd { (meaning) } }
                }
            }
        }
    }
}

/// Explains why some version fails although its `max_diff` is no larger than that of any version that passes:
/// this is unexpected in the table of versions.
fn small_and_wrong(climb: &Climb) -> Markup {
    let difference = |rung: &Climbed| rung.study.check.error.map(|error| error.max_diff);
    let (passed, others): (Vec<_>, Vec<_>) =
        climb.rungs.iter().partition(|rung| rung.study.check.verdict == Verdict::Passed);
    let least = passed.iter().filter_map(|rung| difference(rung)).min_by(f64::total_cmp);
    let small = |rung: &&Climbed| difference(rung).zip(least).is_some_and(|(ours, least)| ours <= least);
    html! {
        @for rung in others.into_iter().filter(small) {
            p {
                b { (rung.rung.name) } " fails although its max_diff is as small as any: max_diff is of one run, in which "
                "the outputs happened to be right. "
                @if let Some(reason) = rung.study.check.reasons.first() { "The check found: " (reason) ". " }
                "Another order of threads, or other inputs, give a wrong output: a kernel is right only if every run is."
            }
        }
    }
}

pub(super) fn times(climb: &Climb) -> Markup {
    let rows: Vec<Bar> = climb
        .rungs
        .iter()
        .map(|rung| Bar {
            name: &rung.rung.name,
            value: rung.us(),
            range: rung.study.prediction().map(|p| (p.us_low, p.us_high)),
            quoted: rung.rung.quoted_us(),
            mark: "quoted",
            class: rung.study.check.verdict.name(),
        })
        .collect();
    let device = climb.machines.first().map_or("", |m| m.name);
    let kind = match &climb.card {
        Some(card) => format!("passed, measured on {card}"),
        None => format!("passed, predicted on {device}"),
    };
    let line = if climb.card.is_some() {
        "Logarithmic. The thin line is the prediction that was made before, with its uncertainty."
    } else {
        "Logarithmic. The thin line is the stated uncertainty of the prediction."
    };
    html! {
        div.legend {
            span { i style="background:var(--passed)" {} (kind) }
            span { i style="background:var(--failed)" {} "failed: wrong kernel, time not comparable" }
            span { i style="background:var(--quoted)" {} "quoted from the original kernels' log of an L4" }
        }
        (bars(&rows))
        p.soft { (line) }
    }
}

/// Number of causes with their own colour. The others are grey.
const SHOWN: usize = 8;

pub(super) fn causes(climb: &Climb) -> Markup {
    // Ordered by the largest share in any rung, so that a cause that dominates a single rung has a colour.
    let mut largest: Vec<(Cause, f64)> = Cause::ALL.iter().map(|&c| (c, 0.0)).collect();
    for prediction in climb.rungs.iter().filter_map(|r| r.study.prediction()) {
        largest.iter_mut().for_each(|(cause, share)| *share = share.max(prediction.share(*cause)));
    }
    largest.sort_by(|a, b| b.1.total_cmp(&a.1));
    let colour = |cause: Cause| largest.iter().position(|(c, _)| *c == cause).unwrap_or(SHOWN).min(SHOWN);
    let rows: Vec<_> = climb
        .rungs
        .iter()
        .filter_map(|rung| {
            let part =
                |&(cause, share): &(Cause, f64)| Part { name: cause.name(), share, colour: colour(cause) };
            let mut parts: Vec<Part> = rung.study.prediction()?.split.iter().map(part).collect();
            parts.sort_by_key(|part| part.colour);
            Some((rung.rung.name.as_str(), parts))
        })
        .collect();
    html! {
        div.legend {
            @for (i, (cause, _)) in largest.iter().take(SHOWN).enumerate() {
                span { i class=(format!("c{i}")) {} (cause.name()) }
            }
            span { i.c8 {} "other" }
        }
        (stacked(&rows))
        p.soft { "Share of warp time in the predicted run, in per cent." }
    }
}

pub(super) fn roofs(climb: &Climb) -> Markup {
    let points: Vec<Point> = climb
        .rungs
        .iter()
        .filter_map(|rung| {
            let roof = rung.study.prediction()?.roofline;
            let class = rung.study.check.verdict.name();
            Some(Point { name: &rung.rung.name, intensity: roof.intensity, tflops: roof.tflops, class })
        })
        .collect();
    let Some(gpu) = climb.machines.first() else { return html! {} };
    let l2_gbps = f64::from(gpu.memory.l2_bandwidth) * gpu.clock_mhz * 1e-3;
    html! {
        div.legend {
            span { i.round style="background:var(--passed)" {} "passed" }
            span { i.ring {} "failed: wrong kernel" }
        }
        (roofline(&points, gpu.tensor_tflops(), gpu.memory.dram_gbps * 1e-3, l2_gbps * 1e-3))
        p.soft { (gpu.name) ": " (short(gpu.tensor_tflops())) " TFLOP/s dense on tensor cores, "
            (short(gpu.memory.dram_gbps)) " GB/s of DRAM, " (short(l2_gbps))
            " GB/s of L2 (dashed), where inputs of this size stay from launch to launch. A kernel above the solid slope "
            "reads more from L2 than DRAM could give: the dashed slope is its limit." }
    }
}

pub(super) fn failed(climb: &Climb) -> Markup {
    let failed = climb.rungs.iter().filter(|r| r.study.check.verdict != Verdict::Passed);
    html! {
        @for rung in failed {
            @let lines: Vec<&str> = rung.study.sources.ptx().lines().collect();
            @let quote = |line: u32| (line as usize).checked_sub(1).and_then(|i| lines.get(i)).map_or("", |l| l.trim());
            h3 { (rung.rung.name) }
            p { (rung.rung.story) }
            @for hazard in rung.study.check.hazards.iter().take(3) {
                div.hazard {
                    (hazard.to_string())
                    code { (hazard.line) ": " (quote(hazard.line)) }
                    @if let Some(other) = hazard.other_line { code { (other) ": " (quote(other)) } }
                }
            }
            @if rung.study.check.hazards.is_empty() {
                @for reason in rung.study.check.reasons.iter().take(3) { div.hazard { (reason) } }
            }
        }
    }
}

pub(super) fn forecasts(climb: &Climb) -> Markup {
    let rows = climb.rungs.iter().filter_map(|r| Some((r, r.rung.forecast_us?)));
    html! {
        (outcomes(climb))
        @if let Some(record) = climb.record() { p { (record.summary()) } }
        div.scroll { table.short.stacks {
            thead { tr { th { "version" } th.n { "the author's own forecast, µs" } th.n { "the outcome, quoted, µs" } th.n { "predicted here, µs" } } }
            tbody { @for (rung, (low, high)) in rows {
                tr {
                    td { b { (rung.rung.name) } }
                    td.n data-label="the author's own forecast, µs" { (short(low)) "–" (short(high)) }
                    td.n data-label="the outcome, quoted, µs" { (rung.rung.quoted_us().map_or("–".into(), short)) }
                    td.n data-label="predicted here, µs" { (rung.predicted_us().map_or("–".into(), short)) }
                }
            } }
        } }
    }
}

/// The time model's forecasts together with the measured times.
fn outcomes(climb: &Climb) -> Markup {
    let (Some(card), Some(score)) = (&climb.card, climb.score()) else { return html! {} };
    let rows = climb.rungs.iter().filter_map(|r| Some((r, r.study.prediction()?, r.measured_us()?)));
    html! {
        p { "Of " (score.rungs) " versions on " (card) " the median error of the forecast is "
            (format!("{:.0}", 100.0 * score.median_error)) " %, and their order is forecast with a rank correlation of "
            (format!("{:.2}", score.spearman)) "." }
        div.scroll { table {
            thead { tr {
                th { "version" } th.n { "forecast by the model, µs" } th.n { "measured" } th.n { "forecast / measured" }
                th { "in its range" } th.n { "error / allowed, on the card" }
            } }
            tbody { @for (rung, prediction, us) in rows {
                tr {
                    td { (rung.rung.name) }
                    td.n { (short(prediction.us)) " (" (short(prediction.us_low)) "–" (short(prediction.us_high)) ")" }
                    td.n { (short(us)) }
                    td.n { (format!("{:.2}", prediction.us / us)) }
                    td { @if (prediction.us_low..=prediction.us_high).contains(&us) { "yes" } @else { "no" } }
                    td.n { (rung.measured.as_ref().and_then(|m| m.error).map_or("–".into(), |e| e.brief())) }
                }
            } }
        } }
    }
}

pub(super) fn findings(climb: &Climb) -> Markup {
    html! {
        @for rung in climb.rungs.iter().filter(|r| !r.study.findings.is_empty()) {
            details open {
                summary { b { (rung.rung.name) } " " span.soft {
                    (rung.study.findings.iter().map(|f| f.name.name()).collect::<Vec<_>>().join(", "))
                } }
                div.scroll { table.stacks {
                    thead { tr { th { "cause" } th { "evidence" } th.n { "lines" } th.n { "gain at most" } th { "cure" } } }
                    tbody { @for f in rung.study.findings.iter().take(3) {
                        tr {
                            td { b { (f.name) } } td { (f.evidence) }
                            td.n data-label=[(!f.lines.is_empty()).then_some("lines")] { (show_lines(&f.lines[..f.lines.len().min(2)])) }
                            td.n data-label="gain at most" { (format!("{:.2}×", f.expected_gain)) }
                            td data-label="cure" { (f.cure) }
                        }
                    } }
                } }
            }
        }
    }
}

pub(super) fn cpu(climb: &Climb) -> Markup {
    html! {
        @if let Some(note) = bench::SLOW_BUILD { p.soft { (note) "." } }
        div.scroll { table.short.stacks {
            thead { tr { th { "element type" } th.n { "µs, median" } th.n { "GFLOP/s" } th.n { "error / allowed" } th.n { "samples" } } }
            tbody { @for race in &climb.cpu {
                @let us = race.first().us();
                tr {
                    td { b { (race.problem.dtypes) } } td.n data-label="µs, median" { (format!("{us:.0}")) }
                    td.n data-label="GFLOP/s" { (short(race.problem.flops() / us * 1e-3)) }
                    td.n data-label="error / allowed" { (race.first().error.map_or("–".into(), |e| e.brief())) }
                    td.n data-label="samples" { (race.first().samples.len()) }
                }
            } }
        } }
    }
}

/// The warmth, of 55, from which a line keeps its stretch unfolded.
const WARM: f64 = 5.0;

pub(super) fn heat_map(climb: &Climb) -> Markup {
    let fused = climb.rungs.iter().find(|rung| rung.rung.name == "fused");
    let Some(fused) = fused.or(climb.rungs.last()) else { return html! {} };
    let mut share = vec![0.0f64; fused.study.sources.ptx().lines().count() + 1];
    for cost in &fused.study.lines {
        if let Some(place) = share.get_mut(cost.line as usize) {
            *place += cost.weight();
        }
    }
    let hottest = share.iter().copied().fold(1e-12, f64::max);
    let lines: Vec<&str> = fused.study.sources.ptx().lines().collect();
    let heat = |line: usize| (share[line + 1] / hottest * 55.0).round();
    html! {
        p.soft { "PTX of \"" (fused.rung.name) "\": the warmer a line, the more of the warps' time it takes; at most "
            (format!("{:.2}", 100.0 * hottest)) " % here." }
        (listing(lines.len(), |line| heat(line) >= WARM, |line| html! {
            @let heat = heat(line);
            span style=[(heat >= 1.0).then(|| format!("background:color-mix(in srgb,var(--failed) {heat}%,transparent)"))] {
                (format!("{:>5}  {}", line + 1, lines[line]))
            }
        }))
    }
}
