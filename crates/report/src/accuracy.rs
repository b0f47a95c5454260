//! The page of `flashcore accuracy`: error over the number of keys, by distribution and by scheme of sums.

use check::accuracy::{Draw, Point, Scheme};
use maud::{Markup, PreEscaped, html};

use crate::panels::{Panel, Scale, panels, panels_of_page};

/// The curves of each distribution, on a common logarithmic scale of errors in %, for a file of its own.
pub fn chart(curves: &[(Draw, Vec<Point>)]) -> Markup {
    panels(&panels_of(curves), &legend(), "%", Scale::Logarithmic)
}

fn legend() -> [String; Scheme::ALL.len()] {
    Scheme::ALL.map(|scheme| scheme.name().to_owned())
}

fn panels_of(curves: &[(Draw, Vec<Point>)]) -> Vec<Panel> {
    let panel = |(draw, points): &(Draw, Vec<Point>)| {
        let line = |(number, scheme): (usize, Scheme)| {
            let of = points.iter().filter(|point| point.scheme == scheme);
            (number, of.map(|point| (point.keys as f64, 100.0 * point.relative)).collect())
        };
        Panel {
            title: draw.name().to_owned(),
            lines: Scheme::ALL.into_iter().enumerate().map(line).collect(),
        }
    };
    curves.iter().map(panel).collect()
}

/// Curves that lie on each other are told apart by width and dashes.
const APART: &str = "svg .curve { stroke-linecap: butt; } svg .s1 { stroke-width: 6; opacity: .55; } \
    svg .s2 { stroke-width: 3; stroke-dasharray: 2 7; } svg .s3 { stroke-width: 1.8; stroke-dasharray: 8 5; }";

/// Sentences about the curves: the inputs for which two-level sums gain most, and the schemes whose curves
/// are one.
pub fn learnt(curves: &[(Draw, Vec<Point>)]) -> Vec<String> {
    let at = |points: &[Point], keys: usize, scheme: Scheme| {
        points.iter().find(|p| p.keys == keys && p.scheme == scheme).map(|p| 100.0 * p.relative)
    };
    let gains = curves.iter().filter_map(|(draw, points)| {
        let keys = points.iter().map(|point| point.keys).max()?;
        Some((draw, keys, at(points, keys, Scheme::Running)?, at(points, keys, Scheme::ByBlock)?))
    });
    let most = gains.max_by(|a, b| (a.2 / a.3).total_cmp(&(b.2 / b.3)));
    let gain = most.map(|(draw, keys, single, two)| {
        format!(
            "At {keys} keys and inputs \u{201c}{}\u{201d}, single-level sums are wrong by {single:.2} %, two-level sums by {two:.2} %.",
            draw.name()
        )
    });
    let distance = |a: Scheme, b: Scheme| {
        let ratios = curves.iter().flat_map(|(_, points)| {
            points
                .iter()
                .filter(move |p| p.scheme == a)
                .filter_map(move |p| Some(100.0 * p.relative / at(points, p.keys, b)?))
        });
        ratios.map(|ratio| ratio.max(1.0 / ratio)).fold(1.0, f64::max)
    };
    let pairs =
        Scheme::ALL.iter().enumerate().flat_map(|(i, a)| Scheme::ALL[i + 1..].iter().map(move |b| (*a, *b)));
    let alike = pairs.map(|(a, b)| (a, b, distance(a, b))).filter(|(.., distance)| *distance < ALIKE);
    let alike = alike.map(|(a, b, distance)| {
        format!(
            "The curves of {} and {} differ by at most {:.0} %.",
            a.name(),
            b.name(),
            100.0 * (distance - 1.0)
        )
    });
    gain.into_iter().chain(alike).collect()
}

/// Curves that differ by less than this factor everywhere look like one.
const ALIKE: f64 = 1.15;

/// The page. Each distribution has points of all schemes in the order of [`Scheme::ALL`].
pub fn page(curves: &[(Draw, Vec<Point>)]) -> String {
    let legend = legend();
    let body = html! {
        body {
            h1 { "8-bit attention over the number of keys" }
            p.soft {
                "Error of O against attention in f64 on the same e4m3 inputs, in % of O (root mean square), "
                "over the number of keys; the scale is logarithmic. Computed by the emulator's model of the tensor cores of sm_90, "
                "for 16 queries of head dim 128; no kernel ran."
            }
            @for sentence in learnt(curves) { p { b { (sentence) } } }
            (panels_of_page(&panels_of(curves), &legend, "%", Scale::Logarithmic))
            p {
                "The tensor cores align the 32 products of a sum, and the accumulator, to the largest exponent "
                "and keep 13 bits below it. One accumulator over all keys loses the contributions of light keys. "
                "Two-level sums give each block of 128 keys an accumulator of its own and add it to O in f32."
            }
            div.scroll { table.stacks {
                caption { "Error in % of O" }
                thead { tr {
                    th { "inputs" } th.n { "keys" }
                    @for name in &legend { th.n { (name) } }
                } }
                tbody {
                    @for (draw, points) in curves {
                        @for points in points.chunks(Scheme::ALL.len()) {
                            tr {
                                td { (draw.name()) }
                                td.n data-label="keys" { (points[0].keys) }
                                @for (point, name) in points.iter().zip(&legend) {
                                    td.n data-label=(name) { (format!("{:.2}", 100.0 * point.relative)) }
                                }
                            }
                        }
                    }
                }
            } }
        }
    };
    let style = html! { style { (PreEscaped(APART)) } };
    crate::frame("FlashCore: 8-bit attention over the number of keys", style, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_has_a_line_and_every_length_a_row() {
        let points = [512, 1024].into_iter().flat_map(|keys| {
            Scheme::ALL.map(|scheme| Point { keys, scheme, relative: 0.01 * keys as f64 / 512.0 })
        });
        let text = page(&[(Draw::Normal, points.collect())]);
        let lines = text.matches("class=\"curve ").count();
        assert_eq!(lines, 2 * 2 * Scheme::ALL.len(), "lines and their legend, in two widths");
        assert_eq!(text.matches("<tr>").count(), 3);
        assert!(text.contains("two-level sums, 1024: 2.00 %"));
    }

    #[test]
    fn the_page_says_what_was_learnt() {
        let of = |errors: [f64; 4]| {
            let points = Scheme::ALL.into_iter().zip(errors);
            points
                .map(|(scheme, error)| Point { keys: 4096, scheme, relative: error / 100.0 })
                .collect::<Vec<_>>()
        };
        let curves = [(Draw::Normal, of([0.2, 0.5, 0.9, 0.19])), (Draw::Channels, of([0.2, 4.0, 6.0, 0.21]))];
        assert_eq!(
            learnt(&curves),
            [
                "At 4096 keys and inputs \u{201c}channels with means\u{201d}, single-level sums are wrong by 4.00 %, two-level \
                 sums by 0.20 %.",
                "The curves of two-level sums and exact sums differ by at most 5 %.",
            ]
        );
    }
}
