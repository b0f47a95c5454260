//! The map of niches: bottlenecks across, tiles down; darker cells are faster.

use maud::{Markup, html};

use super::Links;
use super::axis::{grouped, ratio, time};
use super::view::ProblemView;
use ledger::Niche;

/// Minimum width of a cell, and its height.
const CELL: (f64, f64) = (104.0, 44.0);
/// Minimum width of the chart.
const WIDTH: f64 = 520.0;
const LEFT: f64 = 96.0;
const TOP: f64 = 36.0;
/// Times at least this factor above the best have the palest shade.
const PALE: f64 = 3.0;
/// Number of cells side by side where each bottleneck has a map of its own.
const COLUMNS: usize = 5;
/// The most tiles in a map of several bottlenecks. With more, each bottleneck has a map of its own.
const ROWS: usize = 10;
/// Ratios in the legend.
const STEPS: [f64; 4] = [1.0, 1.25, 1.7, 3.0];

/// The map. A cell shows the time of a race if its candidate raced, else that of its short timing.
pub(super) fn map(view: &ProblemView, links: Links) -> Markup {
    let mut niches = view.niches.clone();
    for niche in &mut niches {
        niche.us = view.raced_us(niche.candidate).unwrap_or(niche.us);
    }
    html! {
        (cells(&niches, links))
        @if !view.is_predicted() {
            p.soft { "Times are single short timings, except those of candidates that raced." }
        }
    }
}

fn cells(niches: &[Niche], links: Links) -> Markup {
    let Some(best) = niches.iter().map(|n| n.us).min_by(f64::total_cmp) else {
        return html! { p.soft { "No cell is filled yet." } };
    };
    let mut bounds: Vec<&str> = niches.iter().map(|n| n.bound.as_str()).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut tiles: Vec<&str> = niches.iter().map(|n| n.tile.as_str()).collect();
    tiles.sort_by_key(|tile| extent(tile));
    tiles.dedup();
    if tiles.len() > if bounds.len() == 1 { COLUMNS } else { ROWS } {
        return html! { @for bound in &bounds { (of_one_bound(niches, bound, &tiles, best, links)) } };
    }
    let cell = ((WIDTH - LEFT - 8.0) / bounds.len() as f64).clamp(CELL.0, 1.6 * CELL.0);
    let width = (LEFT + cell * bounds.len() as f64 + 8.0).max(WIDTH);
    let height = TOP + CELL.1 * tiles.len() as f64 + 46.0;
    let find = |bound: &str, tile: &str| niches.iter().find(|n| n.bound == bound && n.tile == tile);
    html! {
        svg.chart.niches viewBox=(format!("0 0 {width} {height}")) role="img" aria-label="The fastest candidate of each cell" {
            text.head x=(LEFT - 10.0) y="16" text-anchor="end" { "tile" }
            @for (i, bound) in bounds.iter().enumerate() {
                text.tick x=(LEFT + cell * (i as f64 + 0.5)) y="28" text-anchor="middle" { (bound.replace('_', " ")) }
            }
            @for (row, tile) in tiles.iter().enumerate() {
                @let y = TOP + CELL.1 * row as f64;
                text.name x=(LEFT - 10.0) y=(y + CELL.1 / 2.0 + 4.0) text-anchor="end" { (tile) }
                @for (column, bound) in bounds.iter().enumerate() {
                    @let x = LEFT + cell * column as f64;
                    @match find(bound, tile) {
                        Some(niche) => (elite(niche, best, (x, y, cell), links)),
                        None => rect.empty x=(x + 1.5) y=(y + 1.5) width=(cell - 3.0) height=(CELL.1 - 3.0) rx="3" {},
                    }
                }
            }
            @let y = height - 26.0;
            text.tick x=(LEFT - 10.0) y=(y + 11.0) text-anchor="end" { "time / best" }
            @for (i, step) in STEPS.iter().enumerate() {
                @let x = LEFT + 64.0 * i as f64;
                rect class=(format!("cell {}", shade(*step))) x=(x + 1.5) y=(y) width="14" height="14" rx="2" {}
                text.tick x=(x + 22.0) y=(y + 11.0) { (format!("{step:.2}")) @if i + 1 == STEPS.len() { " or more" } }
            }
        }
    }
}

/// The cells of a single bottleneck, several side by side, each under its tile.
fn of_one_bound(niches: &[Niche], bound: &str, tiles: &[&str], best: f64, links: Links) -> Markup {
    let find = |tile: &str| niches.iter().find(|niche| niche.bound == bound && niche.tile == tile);
    let tiles: Vec<&&str> = tiles.iter().filter(|tile| find(tile).is_some()).collect();
    let (wide, high) = (WIDTH / COLUMNS as f64, CELL.1 + 18.0);
    let height = high * tiles.len().div_ceil(COLUMNS) as f64 + 8.0;
    html! {
        p.soft { "Bound by " (bound.replace('_', " ")) ": a cell is a tile." }
        svg.chart.niches viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="The fastest candidate of each tile" {
            @for (i, tile) in tiles.iter().enumerate() {
                @let (x, y) = (wide * (i % COLUMNS) as f64, high * (i / COLUMNS) as f64);
                text.tick x=(x + wide / 2.0) y=(y + 13.0) text-anchor="middle" { (tile) }
                @if let Some(niche) = find(tile) { (elite(niche, best, (x, y + 16.0, wide), links)) }
            }
        }
    }
}

fn elite(niche: &Niche, best: f64, (x, y, wide): (f64, f64, f64), links: Links) -> Markup {
    let count = grouped(niche.timed);
    links.candidate(
        niche.candidate,
        html! {
            g.niche {
                @let shade = shade(niche.us / best);
                rect class=(format!("cell {shade}")) x=(x + 1.5) y=(y + 1.5) width=(wide - 3.0) height=(CELL.1 - 3.0) rx="3" {}
                text class=(format!("on {shade}")) x=(x + wide / 2.0) y=(y + 19.0) text-anchor="middle" { (time(niche.us)) " µs" }
                text class=(format!("on small {shade}")) x=(x + wide / 2.0) y=(y + 34.0) text-anchor="middle" {
                    @if niche.us <= best { "best of " (count) } @else { (count) " tried" }
                }
                title {
                    (niche.tile) ", bound by " (niche.bound) ": #" (niche.candidate.0) " takes " (time(niche.us)) " µs, "
                    (ratio(niche.us / best)) " the best's; " (count) " tried"
                }
            }
        },
    )
}

/// One of nine shades: `h8` for the best time, `h0` for times at least [`PALE`] times as long.
fn shade(over: f64) -> &'static str {
    const SHADES: [&str; 9] = ["h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8"];
    let part = 1.0 - over.max(1.0).ln() / PALE.ln();
    SHADES[(part.clamp(0.0, 1.0) * 8.0).round() as usize]
}

/// Sort key of tiles: area, then rows, of `64×128`.
fn extent(tile: &str) -> (u64, u64, String) {
    let mut sides = tile.split(|c: char| !c.is_ascii_digit()).filter_map(|s| s.parse::<u64>().ok());
    let (rows, keys) = (sides.next().unwrap_or(0), sides.next().unwrap_or(1));
    (rows.saturating_mul(keys), rows, tile.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A CPU has many tiles. One row for each would fill pages, so that each bottleneck gets a grid of cells.
    #[test]
    fn many_tiles_are_a_grid() {
        let niche = |bound: &str, keys: i64| Niche {
            bound: bound.to_owned(),
            tile: format!("16x{keys}"),
            candidate: ledger::CandidateId(keys),
            us: 10.0 + keys as f64,
            timed: 1,
        };
        let niches: Vec<Niche> =
            (1..=12).map(|keys| niche("arithmetic", keys)).chain([niche("memory", 1)]).collect();
        let map = cells(&niches, Links::Live).into_string();
        assert_eq!(map.matches("<svg").count(), 2, "{map}");
        assert_eq!(map.matches("class=\"niche\"").count(), 13, "{map}");
        assert!(
            map.contains(&format!("viewBox=\"0 0 520 {}\"", 3.0 * 62.0 + 8.0)),
            "three rows of five: {map}"
        );
    }

    #[test]
    fn shades_and_order() {
        assert_eq!([1.0, 0.9, 3.0, 50.0, 3f64.sqrt()].map(shade), ["h8", "h8", "h0", "h0", "h4"]);
        let mut tiles = ["128×64", "64×64", "16×32", "64×128"];
        tiles.sort_by_key(|tile| extent(tile));
        assert_eq!(tiles, ["16×32", "64×64", "64×128", "128×64"]);
    }
}
