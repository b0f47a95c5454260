//! A listing of code in which the warmer lines are those with the larger share of the time. Cold stretches
//! are folded, so that a listing begins where the time goes.

use maud::{Markup, html};

/// The number of lines without a share from which a stretch is folded.
const COLD: usize = 12;
/// Lines shown on each side of a warm line.
const AROUND: usize = 2;

/// The listing. `span` makes the element of a line, counted from 0, and `is_warm` says which lines have a
/// share.
pub(crate) fn listing(
    lines: usize,
    is_warm: impl Fn(usize) -> bool,
    span: impl Fn(usize) -> Markup,
) -> Markup {
    html! {
        div.listing {
            @for (from, to, is_folded) in stretches(lines, is_warm) {
                @if is_folded {
                    details.cold {
                        summary { "lines " (from + 1) " to " (to) ": hardly any time" }
                        pre.heat { @for line in from..to { (span(line)) } }
                    }
                } @else {
                    pre.heat { @for line in from..to { (span(line)) } }
                }
            }
        }
    }
}

/// The stretches of a listing, from a line up to another one, and whether they are folded.
fn stretches(lines: usize, is_warm: impl Fn(usize) -> bool) -> Vec<(usize, usize, bool)> {
    let near = |line: usize| (line.saturating_sub(AROUND)..(line + AROUND + 1).min(lines)).any(&is_warm);
    let mut found: Vec<(usize, usize, bool)> = Vec::new();
    for line in 0..lines {
        match found.last_mut() {
            Some((_, to, is_cold)) if *is_cold != near(line) => *to = line + 1,
            _ => found.push((line, line + 1, !near(line))),
        }
    }
    let mut joined: Vec<(usize, usize, bool)> = Vec::new();
    for (from, to, is_cold) in found {
        let is_folded = is_cold && to - from >= COLD;
        match joined.last_mut() {
            Some((_, end, false)) if !is_folded => *end = to,
            _ => joined.push((from, to, is_folded)),
        }
    }
    // Without a warm line there is nothing to fold around.
    if lines > 0 && joined.iter().all(|(.., is_folded)| *is_folded) {
        vec![(0, lines, false)]
    } else {
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cold_stretches_are_folded() {
        let warm = |line: usize| [31, 40, 90].contains(&line);
        assert_eq!(stretches(100, warm), [(0, 29, true), (29, 43, false), (43, 88, true), (88, 100, false)]);
        assert_eq!(stretches(20, |_| false), [(0, 20, false)]);
        assert_eq!(stretches(0, |_| true), []);
        let shown = listing(100, warm, |line| html! { span { (line) } }).into_string();
        assert_eq!((shown.matches("<span>").count(), shown.matches("<details").count()), (100, 2));
        assert!(shown.contains("lines 1 to 29: hardly any time"), "{shown}");
    }
}
