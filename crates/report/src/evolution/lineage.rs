//! The ancestry of the best candidate, with the changes of each step.

use std::collections::HashMap;

use maud::{Markup, html};
use serde_json::Value;

use super::axis::{px, ratio, time};
use super::cascade::operator_name;
use super::ranking::clip;
use super::view::{ANCESTORS, ProblemView};
use super::{AXIS_TEXT, Links};
use ledger::{Ancestor, CandidateId};

const WIDTH: f64 = 900.0;
const ROW: f64 = 26.0;
const TOP: f64 = 26.0;
const LANE: f64 = 16.0;
const FIRST: f64 = 18.0;
/// Number of separate lanes. Further lines of descent share the last lane.
const LANES: usize = 6;

/// An ancestor with its position: seeds at the top, the best at the bottom.
struct Node<'a> {
    ancestor: &'a Ancestor,
    lane: usize,
    row: usize,
}

pub(super) fn tree(view: &ProblemView, links: Links) -> Markup {
    if view.lineage.is_empty() {
        return html! { p.soft { "Nothing is faster than the baseline yet." } };
    }
    let nodes = place(&view.lineage);
    let lanes = nodes.values().map(|n| n.lane + 1).max().unwrap_or(1);
    let rows = nodes.len();
    let x = |lane: usize| FIRST + LANE * lane as f64;
    let y = |row: usize| TOP + ROW * (row as f64 + 0.5);
    let text = x(lanes - 1) + 18.0;
    // Columns: number, operator, changes; time and gain at the right edge.
    let (operator, changed) = (text + 56.0, text + 56.0 + 170.0);
    let room = ((WIDTH - 170.0 - changed) / 6.7) as usize;
    let height = TOP + ROW * rows as f64 + 8.0;
    let mut sorted: Vec<&Node> = nodes.values().collect();
    sorted.sort_by_key(|n| n.row);
    html! {
        svg.chart.lineage.roomy viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Ancestors of the best candidate" {
            text.head x=(text) y="16" { "candidate" }
            text.head x=(operator + 14.0) y="16" { "operator" }
            text.head x=(changed) y="16" { "what changed" }
            text.head x=(WIDTH - 96.0) y="16" text-anchor="end" { "µs" }
            text.head x=(WIDTH - 12.0) y="16" text-anchor="end" { "gain" }
            @for node in &sorted {
                @for (i, parent) in node.ancestor.parents.iter().enumerate() {
                    @if let Some(from) = nodes.get(parent) {
                        path class=(if i == 0 { "edge" } else { "edge second" })
                            d=(edge((x(from.lane), y(from.row)), (x(node.lane), y(node.row)))) {}
                    }
                }
            }
            @for node in &sorted {
                @let a = node.ancestor;
                @let middle = y(node.row);
                @let best = node.row + 1 == rows;
                g.row {
                    circle class=(if best { "mark evolution" } else if a.parents.is_empty() { "mark seed" } else { "mark step" })
                        cx=(px(x(node.lane))) cy=(middle) r=(if best { "6" } else { "4.6" }) {}
                    (links.candidate(a.candidate, html! { text.name x=(text) y=(middle + AXIS_TEXT) { "#" (a.candidate.0) } }))
                    text.what x=(operator + 14.0) y=(middle + AXIS_TEXT) { (clip(&operator_name(&a.operator), 22)) }
                    text.what.mono x=(changed) y=(middle + AXIS_TEXT) { (clip(&changes(&a.changes), room)) }
                    @let class = if view.raced_us(a.candidate).is_some() { "value" } else { "value short" };
                    text class=(class) x=(WIDTH - 96.0) y=(middle + AXIS_TEXT) text-anchor="end" { (us_of(a, view).map_or("–".into(), time)) }
                    text class=(class) x=(WIDTH - 12.0) y=(middle + AXIS_TEXT) text-anchor="end" { (gain(a, &nodes, view).map_or("–".into(), ratio)) }
                    title { "#" (a.candidate.0) " " (a.operator) ": " (changes(&a.changes)) }
                }
            }
        }
        (listed(&sorted, &nodes, view, links))
        @let is_short = |a: &Ancestor| view.raced_us(a.candidate).is_none();
        @if !view.is_predicted() && view.lineage.iter().any(is_short) { p.soft { "Grey times are single short timings, the others are from races." } }
        @if view.lineage.len() > rows { p.soft { "Further ancestors are not drawn." } }
    }
}

/// The rows of the chart as text, for narrow screens.
fn listed(sorted: &[&Node], nodes: &HashMap<CandidateId, Node>, view: &ProblemView, links: Links) -> Markup {
    html! {
        ol.narrow {
            @for node in sorted {
                @let a = node.ancestor;
                li {
                    b { (links.number(a.candidate)) } " " (operator_name(&a.operator))
                    @if let Some(us) = us_of(a, view) { ", " (time(us)) " µs" }
                    @if let Some(gain) = gain(a, nodes, view) { ", gain " (ratio(gain)) }
                    @let changed = changes(&a.changes);
                    @if !changed.is_empty() { div.soft { (changed) } }
                }
            }
        }
    }
}

/// Time of the first parent divided by the candidate's time.
fn gain(ancestor: &Ancestor, nodes: &HashMap<CandidateId, Node>, view: &ProblemView) -> Option<f64> {
    let parent = nodes.get(ancestor.parents.first()?)?;
    Some(us_of(parent.ancestor, view)? / us_of(ancestor, view)?)
}

/// The time of a candidate: from its race or, without a race, from its short timing.
fn us_of(ancestor: &Ancestor, view: &ProblemView) -> Option<f64> {
    view.raced_us(ancestor.candidate).or(ancestor.us)
}

/// The changes in words: `block_n 64 → 128, stages 2 → 3`.
pub(super) fn changes(changes: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let one = |(gene, change): (&String, &Value)| match change.as_array().map(Vec::as_slice) {
        Some([from, to]) => format!("{gene} {} → {}", plain(from), plain(to)),
        _ => format!("{gene} {}", plain(change)),
    };
    changes.as_object().map(|genes| genes.iter().map(one).collect::<Vec<_>>().join(", ")).unwrap_or_default()
}

/// Assigns a row to each of the nearest ancestors, oldest first, and a lane to each line of descent. A first
/// parent keeps its child's lane, a second parent opens another.
fn place(lineage: &[Ancestor]) -> HashMap<CandidateId, Node<'_>> {
    let kept: Vec<&Ancestor> = lineage.iter().take(ANCESTORS).collect();
    let mut lanes: HashMap<CandidateId, usize> = HashMap::new();
    let mut free = 1;
    for (i, ancestor) in kept.iter().enumerate() {
        if i == 0 {
            lanes.insert(ancestor.candidate, 0);
        }
        let own = lanes.get(&ancestor.candidate).copied().unwrap_or(0);
        for (n, parent) in ancestor.parents.iter().enumerate() {
            lanes.entry(*parent).or_insert_with(|| {
                if n == 0 {
                    return own;
                }
                free += 1;
                (free - 1).min(LANES - 1)
            });
        }
    }
    // Parents come before children, because numbers grow in the order of creation.
    let mut order: Vec<&Ancestor> = kept;
    order.sort_by_key(|a| a.candidate);
    let nodes = order.into_iter().enumerate().map(|(row, ancestor)| {
        let lane = lanes.get(&ancestor.candidate).copied().unwrap_or(0);
        (ancestor.candidate, Node { ancestor, lane, row })
    });
    nodes.collect()
}

fn edge((x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> String {
    if x0 == x1 {
        return format!("M{x0} {y0}V{y1}");
    }
    // The line runs along its own lane, then into the child's lane just above the child.
    format!("M{x0} {y0}V{}C{x0} {} {x1} {} {x1} {y1}", y1 - ROW, y1 - 0.4 * ROW, y1 - 0.6 * ROW)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ancestor(id: i64, parents: &[i64]) -> Ancestor {
        Ancestor {
            candidate: CandidateId(id),
            operator: "mutate:stages".into(),
            parents: parents.iter().map(|p| CandidateId(*p)).collect(),
            changes: json!({ "stages": [2, 3] }),
            us: Some(10.0 / id as f64),
        }
    }

    #[test]
    fn a_first_parent_keeps_the_lane_and_a_second_opens_one() {
        let line =
            [ancestor(9, &[5, 7]), ancestor(5, &[1]), ancestor(7, &[2]), ancestor(1, &[]), ancestor(2, &[])];
        let nodes = place(&line);
        let at = |id: i64| (nodes[&CandidateId(id)].lane, nodes[&CandidateId(id)].row);
        assert_eq!((at(9), at(5), at(1)), ((0, 4), (0, 2), (0, 0)));
        assert_eq!((at(7), at(2)), ((1, 3), (1, 1)));
        let view = crate::evolution::tests::empty();
        assert!((gain(&line[0], &nodes, &view).unwrap() - 9.0 / 5.0).abs() < 1e-12);
        assert_eq!(gain(&line[3], &nodes, &view), None);
    }

    #[test]
    fn changes_in_words() {
        let text = changes(&json!({ "block_n": [64, 128], "order": ["simple", "scores_ahead"] }));
        assert_eq!(text, "block_n 64 → 128, order simple → scores_ahead");
        assert_eq!(changes(&json!(null)), "");
    }
}
