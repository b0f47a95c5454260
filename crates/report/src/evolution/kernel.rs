//! Kernels line by line: line costs and root causes, and two kernels side by side.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::select::Shape;
use maud::{Markup, html};
use serde_json::{Value, json};
use similar::{Algorithm, DiffOp, capture_diff_slices_deadline};

use super::axis::{grouped, percent, ratio, time};
use super::decisions::in_line;
use super::view::in_words;
use crate::anatomy::{Anatomy, dissect};
use crate::listing::listing;
use check::diagnose::{Finding, show_lines};
use host::panics;
use ledger::Candidate;
use ledger::{CandidateId, Ledger, LedgerError, TimeKind};

/// A candidate with the analysis of its kernel.
#[derive(Clone, Debug)]
pub struct AnalysedKernel {
    pub id: CandidateId,
    /// A description in a few words.
    pub name: String,
    pub candidate: Candidate,
    /// The time, µs, and whether it was measured.
    pub time: Option<(f64, TimeKind)>,
    /// The analysis of the kernel, or why there is none.
    pub anatomy: Arc<Result<Anatomy, String>>,
}

/// The input of an analysis. It does not depend on the ledger and the candidate's number.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    candidate: Candidate,
    problem: Shape,
    device: String,
}

impl Work {
    /// The work for a candidate of the ledger.
    ///
    /// # Errors
    /// When there is no such candidate, or the ledger cannot be read.
    pub fn of(ledger: &Ledger, id: CandidateId) -> Result<Work, LedgerError> {
        let new = ledger.candidate(id)?.known.new;
        let device = ledger.run(new.run)?.device;
        Ok(Work { candidate: new.candidate, problem: new.problem, device })
    }

    /// The analysis of the kernel, or why it is not possible.
    pub fn anatomy(&self) -> Result<Anatomy, String> {
        match panics::contain(|| dissect(&self.candidate, &self.problem, &self.device)) {
            Ok(Ok(anatomy)) => Ok(anatomy),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(format!("the kernel cannot be taken apart: {panic}")),
        }
    }
}

impl AnalysedKernel {
    /// Analyses a candidate of the ledger: emits its kernel and runs a few of its CTAs. Takes about a second.
    ///
    /// # Errors
    /// When there is no such candidate, or the ledger cannot be read. A failed analysis is not an error.
    pub fn of(ledger: &Ledger, id: CandidateId) -> Result<AnalysedKernel, LedgerError> {
        let work = Work::of(ledger, id)?;
        let anatomy = Arc::new(work.anatomy());
        AnalysedKernel::with(ledger, id, work, anatomy)
    }

    /// A candidate with an existing analysis. The ledger's facts are read now.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn with(
        ledger: &Ledger,
        id: CandidateId,
        work: Work,
        anatomy: Arc<Result<Anatomy, String>>,
    ) -> Result<AnalysedKernel, LedgerError> {
        let time = ledger.standing(id)?.map(|ranked| (ranked.us, ranked.kind));
        Ok(AnalysedKernel { id, name: in_words(&work.candidate), candidate: work.candidate, time, anatomy })
    }

    /// Whether the kernel is native code of the CPU, which has no PTX to show.
    pub(super) const fn is_native(&self) -> bool {
        matches!(self.candidate, Candidate::Cpu(_))
    }

    fn anatomy(&self) -> Option<&Anatomy> {
        self.anatomy.as_ref().as_ref().ok()
    }

    /// The genes in the plan's order; for a whole kernel, its language.
    fn genes(&self) -> Vec<(String, String)> {
        let object = match &self.candidate {
            Candidate::Gpu(plan) => json!(plan),
            Candidate::Cpu(plan) => json!(plan),
            Candidate::Kernel(source) => json!({ "language": source.language }),
        };
        let fields = object.as_object().into_iter().flatten();
        let is_set = |(_, value): &(&String, &Value)| !value.is_null();
        fields.filter(is_set).map(|(name, value)| (name.clone(), in_line(value))).collect()
    }
}

/// Number of lines in the list of the most expensive lines.
const DEAREST: usize = 12;
/// Number of equal lines shown around a difference.
const AROUND: usize = 3;
/// Time limit of the search for the shortest difference. After that, a longer difference is used.
const PATIENCE: Duration = Duration::from_millis(400);

/// A kernel: its predicted time, the root causes, and each line.
pub fn heat(analysed: &AnalysedKernel) -> Markup {
    let anatomy = match analysed.anatomy.as_ref() {
        Ok(anatomy) => anatomy,
        Err(why) => return html! { p { (analysed.name) ": " (why) "." } (genes(analysed)) },
    };
    let heat = Heat::of(anatomy);
    let lines: Vec<&str> = anatomy.text.lines().collect();
    html! {
        p {
            (analysed.name)
            @if let Some(p) = &anatomy.prediction {
                ": predicted " b { (time(p.us)) " µs" } " (" (time(p.us_low)) " to " (time(p.us_high)) ") on " (p.machine)
                ", bound by " (p.bound.name())
            }
            @if let Some((us, TimeKind::Measured)) = analysed.time { "; measured " b { (time(us)) " µs" } }
            "."
        }
        (findings(&anatomy.findings))
        h3 { "The most expensive lines" }
        (dearest(anatomy))
        details.listing open[anatomy.text.lines().count() < 400] {
            summary {
                "All " (grouped(anatomy.text.lines().count() as u64))
                " lines of PTX; the warmer, the larger the share of " (of_what(anatomy)) ", at most " (percent(heat.hottest))
            }
            (listing(lines.len(), |line| heat.is_warm(line + 1), |line| html! {
                span style=[heat.style(line + 1)] title=[heat.title(line + 1)] { (format!("{:>5}  {}", line + 1, lines[line])) }
            }))
        }
    }
}

fn findings(findings: &[Finding]) -> Markup {
    if findings.is_empty() {
        return html! { p.soft { "No single bottleneck was found." } };
    }
    html! {
        div.scroll { table.findings.stacks {
            thead { tr { th { "cause" } th { "evidence" } th.n { "lines" } th.n { "gain at most" } th { "cure" } } }
            tbody { @for f in findings.iter().take(4) {
                tr {
                    td { b { (f.name) } } td { (f.evidence) }
                    td.n data-label=[(!f.lines.is_empty()).then_some("lines")] { (show_lines(&f.lines[..f.lines.len().min(2)])) }
                    td.n data-label="gain at most" { (ratio(f.expected_gain)) } td data-label="cure" { (f.cure) }
                }
            } }
        } }
    }
}

/// The quantity of which the weights of lines are shares.
fn of_what(anatomy: &Anatomy) -> &'static str {
    if anatomy.lines.iter().any(|line| line.stall.is_some()) { "the warps' time" } else { "the issue slots" }
}

fn dearest(anatomy: &Anatomy) -> Markup {
    let text: Vec<&str> = anatomy.text.lines().collect();
    let mut lines: Vec<_> = anatomy.lines.iter().collect();
    lines.sort_by(|a, b| {
        b.weight().total_cmp(&a.weight()).then(b.issues.cmp(&a.issues)).then(a.line.cmp(&b.line))
    });
    html! {
        div.scroll { table.dearest.stacks {
            thead { tr { th.n { "line" } th.n { "of " (of_what(anatomy)) } th.n { "issues" } th.n { "lanes" } th.n { "conflicts" } th { "PTX" } } }
            tbody { @for l in lines.into_iter().take(DEAREST) {
                tr {
                    td.n data-label="line" { (l.line) }
                    td.n data-label=(format!("of {}", of_what(anatomy))) { (percent(l.weight())) }
                    td.n data-label="issues" { (grouped(l.issues)) } td.n data-label="lanes" { (format!("{:.1}", l.lanes)) }
                    td.n data-label="conflicts" { (format!("{:.1}", l.conflicts)) }
                    td { code { (text.get((l.line as usize).saturating_sub(1)).map_or("", |t| t.trim())) } }
                }
            } }
        } }
    }
}

fn genes(analysed: &AnalysedKernel) -> Markup {
    html! {
        ul.figures { @for (gene, value) in analysed.genes() { li { span.soft { (gene.replace('_', " ")) } " " (value) } } }
    }
}

struct Heat {
    shares: Vec<f64>,
    hottest: f64,
    /// The quantity of which the lines have shares.
    of: &'static str,
}

impl Heat {
    fn of(anatomy: &Anatomy) -> Heat {
        let mut shares = vec![0.0f64; anatomy.text.lines().count() + 1];
        for cost in &anatomy.lines {
            if let Some(place) = shares.get_mut(cost.line as usize) {
                *place += cost.weight();
            }
        }
        let hottest = shares.iter().copied().fold(1e-12, f64::max);
        Heat { shares, hottest, of: of_what(anatomy) }
    }

    /// Whether a line, counted from 1, has at least a tenth of the hottest line's share.
    fn is_warm(&self, line: usize) -> bool {
        self.shares.get(line).is_some_and(|share| 10.0 * share >= self.hottest)
    }

    /// The background of a line, counted from 1.
    fn style(&self, line: usize) -> Option<String> {
        let warmth = (self.shares.get(line)? / self.hottest * 60.0).round();
        (warmth >= 1.0).then(|| format!("--w:{warmth}%"))
    }

    fn title(&self, line: usize) -> Option<String> {
        let share = *self.shares.get(line)?;
        (share > 0.0).then(|| format!("{} of {}", percent(share), self.of))
    }
}

/// Whether the lines of two kernels are visible at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// Collapsed until the reader opens them.
    Folded,
    Shown,
}

/// Two kernels side by side: times, genes, findings and lines.
pub fn difference(a: &AnalysedKernel, b: &AnalysedKernel, shown: Lines) -> Markup {
    html! {
        div.pair {
            @for side in [a, b] {
                div {
                    h3 { "#" (side.id.0) " " (side.name) }
                    @if let Some((us, kind)) = side.time {
                        p { b { (time(us)) " µs" } @if kind == TimeKind::Predicted { " predicted" } @else { " measured" } }
                    }
                    @match side.anatomy.as_ref() {
                        Ok(anatomy) => {
                            @if let Some(p) = &anatomy.prediction {
                                p.soft { "model: " (time(p.us)) " µs (" (time(p.us_low)) " to " (time(p.us_high)) "), bound by "
                                    (p.bound.name()) }
                            }
                            @if anatomy.findings.is_empty() { p.soft { "No single bottleneck was found." } }
                            ul.causes { @for f in anatomy.findings.iter().take(4) {
                                li { b { (f.name) } ", at most " (ratio(f.expected_gain)) br; span.soft { (f.evidence) } }
                            } }
                        }
                        Err(why) => p.soft { "No listing: " (why) "." },
                    }
                }
            }
        }
        (gene_table(a, b))
        @if let (Some(left), Some(right)) = (a.anatomy(), b.anatomy()) { (lines(left, right, shown)) }
    }
}

/// A table of the genes that differ, and one line with the others.
fn gene_table(a: &AnalysedKernel, b: &AnalysedKernel) -> Markup {
    let (left, right) = (a.genes(), b.genes());
    let mut names: Vec<&String> = left.iter().chain(&right).map(|(name, _)| name).collect();
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(*name));
    let of = |genes: &[(String, String)], name: &str| {
        genes.iter().find(|(gene, _)| gene == name).map_or("–".to_owned(), |(_, value)| value.clone())
    };
    let (alike, differ): (Vec<&String>, Vec<&String>) =
        names.into_iter().partition(|name| of(&left, name) == of(&right, name));
    html! {
        @if differ.is_empty() { p { "Their genes are the same." } }
        @else {
            div.scroll { table.genes {
                thead { tr { th { "gene" } th { "#" (a.id.0) } th { "#" (b.id.0) } } }
                tbody { @for name in differ {
                    tr.changed { td { (name.replace('_', " ")) } td { (of(&left, name)) } td { (of(&right, name)) } }
                } }
            } }
        }
        @if !alike.is_empty() {
            ul.figures { li.soft { "alike:" } @for name in alike { li { span.soft { (name.replace('_', " ")) } " " (of(&left, name)) } } }
        }
    }
}

/// A line index on one side; `None` where only the other side has a line.
type Side = Option<usize>;

/// The alignment of two listings: pairs of lines, in runs that are equal or different.
fn aligned(left: &[&str], right: &[&str]) -> Vec<(bool, Vec<(Side, Side)>)> {
    let plain = |lines: &[&str]| lines.iter().map(|line| unnumbered(line)).collect::<Vec<_>>();
    let deadline = Some(Instant::now() + PATIENCE);
    let ops = capture_diff_slices_deadline(Algorithm::Myers, &plain(left), &plain(right), deadline);
    let runs = ops.into_iter().map(|op| match op {
        DiffOp::Equal { old_index, new_index, len } => {
            (true, (0..len).map(|i| (Some(old_index + i), Some(new_index + i))).collect())
        }
        DiffOp::Delete { old_index, old_len, .. } => {
            (false, (0..old_len).map(|i| (Some(old_index + i), None)).collect())
        }
        DiffOp::Insert { new_index, new_len, .. } => {
            (false, (0..new_len).map(|i| (None, Some(new_index + i))).collect())
        }
        DiffOp::Replace { old_index, old_len, new_index, new_len } => {
            let side = |index: usize, len: usize, i: usize| (i < len).then_some(index + i);
            (
                false,
                (0..old_len.max(new_len))
                    .map(|i| (side(old_index, old_len, i), side(new_index, new_len, i)))
                    .collect(),
            )
        }
    });
    runs.collect()
}

/// A line without register and label numbers, which shift with every line that is inserted above.
fn unnumbered(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut name = false;
    for c in line.trim().chars() {
        match c {
            '%' | '$' => name = true,
            c if c.is_ascii_alphanumeric() || c == '_' => {
                if name && c.is_ascii_digit() {
                    continue;
                }
            }
            _ => name = false,
        }
        plain.push(c);
    }
    plain
}

fn lines(left: &Anatomy, right: &Anatomy, shown: Lines) -> Markup {
    let (one, other): (Vec<&str>, Vec<&str>) = (left.text.lines().collect(), right.text.lines().collect());
    let (warm, warmer) = (Heat::of(left), Heat::of(right));
    let runs = aligned(&one, &other);
    let differing: usize = runs.iter().filter(|(alike, _)| !alike).map(|(_, pairs)| pairs.len()).sum();
    let last = runs.len().saturating_sub(1);
    let row = |alike: bool, (a, b): &(Side, Side)| {
        html! {
            tr.changed[!alike] {
                (cell(*a, &one, &warm)) (cell(*b, &other, &warmer))
            }
        }
    };
    html! {
        details.listing open[shown == Lines::Shown] {
        summary { "Line by line: " (grouped(differing as i128)) " rows differ" }
        p.soft { "Numbers of registers and labels do not count. Warmth is each line's share of " (of_what(left)) " of its kernel." }
        div.difference {
            @for (i, (alike, pairs)) in runs.iter().enumerate() {
                @let (before, after) = (if i == 0 { 0 } else { AROUND }, if i == last { 0 } else { AROUND });
                @if *alike && pairs.len() > before + after + 2 {
                    table { tbody { @for pair in &pairs[..before] { (row(true, pair)) } } }
                    details { summary { (grouped((pairs.len() - before - after) as u64)) " lines alike" }
                        table { tbody { @for pair in &pairs[before..pairs.len() - after] { (row(true, pair)) } } } }
                    table { tbody { @for pair in &pairs[pairs.len() - after..] { (row(true, pair)) } } }
                } @else {
                    table { tbody { @for pair in pairs { (row(*alike, pair)) } } }
                }
            }
        }
        }
    }
}

fn cell(side: Side, text: &[&str], heat: &Heat) -> Markup {
    html! {
        @match side {
            Some(i) => {
                td.at { (i + 1) }
                td.line style=[heat.style(i + 1)] title=[heat.title(i + 1)] { (text.get(i).map_or("", |t| t.trim_end())) }
            }
            None => { td.at {} td.line.none {} }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_registers_do_not_count() {
        assert_eq!(unnumbered("  add.s32 %r12, %r3, 16;"), "add.s32 %r, %r, 16;");
        assert_eq!(unnumbered("$L12_loop: bra $L3;"), "$L_loop: bra $L;");
        let runs = aligned(&["mov %r1, 0;", "ret;", "a"], &["mov %r7, 0;", "bar.sync 0;", "ret;", "b"]);
        let shape: Vec<_> = runs.iter().map(|(alike, pairs)| (*alike, pairs.len())).collect();
        assert_eq!(shape, [(true, 1), (false, 1), (true, 1), (false, 1)]);
        assert_eq!(runs[1].1, [(None, Some(1))]);
        assert_eq!(runs[3].1, [(Some(2), Some(3))]);
    }

    #[test]
    fn a_native_plan_shows_its_genes_and_why_no_lines() {
        let problem = problem::Problem::mission();
        let plan = |block_kv| cpu::CpuPlan { block_kv, ..cpu::CpuPlan::for_problem(&problem) };
        let analysed = |id, block_kv| AnalysedKernel {
            id: CandidateId(id),
            name: "<native>".into(),
            candidate: Candidate::Cpu(plan(block_kv)),
            time: Some((12.5, TimeKind::Measured)),
            anatomy: Arc::new(Err("no PTX".into())),
        };
        let page = difference(&analysed(1, 64), &analysed(2, 128), Lines::Shown).into_string();
        assert!(page.contains("&lt;native&gt;") && page.contains("no PTX."), "{page}");
        assert_eq!(page.matches("<tr class=\"changed\">").count(), 1, "{page}");
        assert!(page.contains("12.50 µs"));
    }
}
