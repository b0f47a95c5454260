//! Line charts of several contestants over a size, one panel for each kind of problem.

use maud::{Markup, html};

use super::chart::{CHARACTER, WIDTH, in_both_widths, short};

pub struct Panel {
    /// The common properties of its problems.
    pub title: String,
    /// One line per contestant: the contestant's number in the legend, and points of size and rate.
    pub lines: Vec<(usize, Vec<(f64, f64)>)>,
}

/// The scale of the rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0.
    Linear,
    /// Whole powers of ten.
    Logarithmic,
}

/// The grid lines of a scale: value and height from 0 to 1.
struct Grid {
    scale: Scale,
    lines: Vec<f64>,
}

impl Grid {
    /// The grid for values from `least`, which is positive, to `most`.
    fn new(scale: Scale, least: f64, most: f64) -> Grid {
        let lines = match scale {
            Scale::Linear => {
                let step = step(most);
                (0..=(most / step).ceil() as usize).map(|tick| tick as f64 * step).collect()
            }
            Scale::Logarithmic => {
                let from = least.log10().floor() as i32;
                let to = (most.log10().ceil() as i32).max(from + 1);
                (from..=to).map(|power| 10f64.powi(power)).collect()
            }
        };
        Grid { scale, lines }
    }

    fn height(&self, value: f64) -> f64 {
        let (low, high) = (self.lines[0], self.lines[self.lines.len() - 1]);
        match self.scale {
            Scale::Linear => value / high,
            Scale::Logarithmic => (value / low).log10() / (high / low).log10(),
        }
    }
}

const COLUMNS: usize = 2;
const GAP: f64 = 46.0;
const HEIGHT: f64 = 190.0;
const LEGEND: f64 = 30.0;
const TITLE: f64 = 22.0;
const FOOT: f64 = 34.0;

/// Panels with a common scale: rates upwards, sizes doubling to the right. The line of the first name in the
/// legend is the boldest. On a logarithmic scale, rates are positive.
pub fn panels(panels: &[Panel], legend: &[String], unit: &str, scale: Scale) -> Markup {
    panels_within(panels, legend, unit, scale, WIDTH)
}

/// [`panels`] for a page: below each other on a narrow screen.
pub fn panels_of_page(panels: &[Panel], legend: &[String], unit: &str, scale: Scale) -> Markup {
    in_both_widths(|width| panels_within(panels, legend, unit, scale, width))
}

fn panels_within(panels: &[Panel], legend: &[String], unit: &str, scale: Scale, width: f64) -> Markup {
    let columns = if width < WIDTH { 1 } else { COLUMNS.min(panels.len()) };
    let rows = panels.len().div_ceil(columns) as f64;
    let names = places(legend, width);
    let top = LEGEND + names.last().map_or(0.0, |(_, y)| *y);
    let height = top + rows * (TITLE + HEIGHT + FOOT);
    let points = || panels.iter().flat_map(|panel| &panel.lines).flat_map(|(_, points)| points);
    let (least, most) = points().fold((f64::INFINITY, 0.0), |(low, high), p| (p.1.min(low), p.1.max(high)));
    let grid = Grid::new(scale, least, most);
    let (first, last) = points().fold((f64::INFINITY, 0.0), |(low, high), p| (p.0.min(low), p.0.max(high)));
    let doublings = (last / first).log2().max(1.0);
    let wide = (width - columns as f64 * GAP - 28.0) / columns as f64;
    html! {
        svg.chart viewBox=(format!("0 0 {width} {height}")) role="img" {
            @for (name, (number, (x, y))) in legend.iter().zip(names.into_iter().enumerate()) {
                line class=(class(number)) x1=(x) x2=(x + 18.0) y1=(y + 14.0) y2=(y + 14.0) {}
                text.name x=(x + 24.0) y=(y + 18.0) { (name) }
            }
            @for (index, panel) in panels.iter().enumerate() {
                @let left = GAP + (index % columns) as f64 * (wide + GAP);
                @let head = top + (index / columns) as f64 * (TITLE + HEIGHT + FOOT) + TITLE;
                @let x = |size: f64| left + (size / first).log2() / doublings * wide;
                @let y = |rate: f64| head + HEIGHT * (1.0 - grid.height(rate));
                text.name x=(left) y=(head - 8.0) { (panel.title) }
                @for &rate in &grid.lines {
                    line.grid x1=(left) x2=(left + wide) y1=(y(rate)) y2=(y(rate)) {}
                    text.tick x=(left - 6.0) y=(y(rate) + 4.0) text-anchor="end" { (rate_text(rate)) }
                }
                @for doubling in (0..=doublings.round() as i32).step_by(if doublings > 8.0 { 2 } else { 1 }) {
                    @let size = first * f64::from(doubling).exp2();
                    text.tick x=(x(size)) y=(head + HEIGHT + 15.0) text-anchor="middle" { (size_text(size)) }
                }
                // The first line is drawn on top.
                @for (number, points) in panel.lines.iter().rev() {
                    path class=(class(*number)) d=(path(points.iter().map(|p| (x(p.0), y(p.1))))) {}
                    @for p in points {
                        circle class=(format!("c{number}")) cx=(x(p.0)) cy=(y(p.1)) r="2.6" {
                            title { (legend[*number]) ", " (format!("{:.0}", p.0)) ": " (short(p.1)) " " (unit) }
                        }
                    }
                }
            }
        }
    }
}

fn rate_text(rate: f64) -> String {
    if rate == 0.0 || rate >= 1.0 { format!("{rate:.0}") } else { rate.to_string() }
}

/// A size in units of 2^20 or 1024, if it is a multiple of them.
fn size_text(size: f64) -> String {
    const MEGA: f64 = 1_048_576.0;
    if size >= MEGA && size % MEGA == 0.0 {
        return format!("{:.0}M", size / MEGA);
    }
    if size >= 1024.0 && size % 1024.0 == 0.0 {
        format!("{:.0}k", size / 1024.0)
    } else {
        format!("{size:.0}")
    }
}

fn class(number: usize) -> String {
    format!("curve s{number}")
}

/// The positions of the legend's names, in as many lines as they need.
fn places(legend: &[String], width: f64) -> Vec<(f64, f64)> {
    let mut next = (GAP, 0.0);
    let place = |name: &String| {
        let takes = 24.0 + CHARACTER * name.chars().count() as f64;
        if next.0 > GAP && next.0 + takes > width {
            next = (GAP, next.1 + 18.0);
        }
        let at = next;
        next.0 += takes + 16.0;
        at
    };
    legend.iter().map(place).collect()
}

/// The distance of grid lines, for about five of them.
fn step(most: f64) -> f64 {
    let rough = (most / 5.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|s| *s >= rough).unwrap_or(rough)
}

fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let steps =
        points.enumerate().map(|(i, (x, y))| format!("{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' }));
    steps.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_lines_are_round_and_few() {
        assert_eq!([0.9, 87.0, 852.0, 4100.0].map(step), [0.2, 20.0, 200.0, 1000.0]);
        for most in [0.7, 3.0, 87.0, 852.0, 4100.0] {
            let lines = most / step(most);
            assert!((2.0..=5.0).contains(&lines), "{most}: {lines}");
        }
    }

    #[test]
    fn a_logarithmic_grid_holds_all_values_between_powers_of_ten() {
        let grid = Grid::new(Scale::Logarithmic, 0.03, 48.0);
        let labels: Vec<String> = grid.lines.iter().map(|&rate| rate_text(rate)).collect();
        assert_eq!(labels, ["0.01", "0.1", "1", "10", "100"]);
        assert!((grid.height(1.0) - 0.5).abs() < 1e-9 && grid.height(0.01) == 0.0);
        assert_eq!(
            [512.0, 1024.0, 1536.0, 131_072.0, 1_048_576.0].map(size_text),
            ["512", "1k", "1536", "128k", "1M"]
        );
    }

    #[test]
    fn every_line_is_drawn_in_its_place() {
        let line = |rate| vec![(512.0, rate), (1024.0, 2.0 * rate), (2048.0, 2.0 * rate)];
        let panel =
            |title: &str| Panel { title: title.into(), lines: vec![(0, line(100.0)), (1, line(50.0))] };
        let both = [panel("D64"), panel("D128 <full>")];
        let svg = panels(&both, &["ours".into(), "peer".into()], "TFLOP/s", Scale::Linear);
        let svg = svg.into_string();
        assert_eq!(svg.matches("<path").count(), 4);
        assert_eq!(svg.matches("<circle").count(), 12);
        assert!(svg.contains("D128 &lt;full&gt;") && svg.contains("ours, 1024: 200 TFLOP/s"), "{svg}");
        // A page has them twice, and the narrow chart holds its legend and one panel per row.
        let names =
            ["two-level sums", "single-level sums", "the scheme of another library"].map(String::from);
        let page = panels_of_page(&both, &names, "%", Scale::Linear).into_string();
        let narrow = page.split("<div class=\"narrow\">").nth(1).unwrap();
        assert_eq!(narrow.matches("<path").count(), 4);
        let placed = places(&names, 400.0);
        let ends = placed.iter().zip(&names).map(|((x, _), name)| x + 24.0 + CHARACTER * name.len() as f64);
        assert!(ends.fold(0.0, f64::max) <= 400.0, "{placed:?}");
        assert_eq!(placed.last().unwrap().1, 18.0, "{placed:?}");
        // A bar of half the maximum ends halfway up.
        let bottom = LEGEND + TITLE + HEIGHT;
        assert!(svg.contains(&format!("M{GAP:.1} {:.1}", bottom - HEIGHT / 2.0)), "{svg}");
    }
}
