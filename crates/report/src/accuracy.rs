//! The page of `flashcore accuracy`: error over the number of keys, by distribution and by scheme of sums.

use check::accuracy::{Draw, Point, Scheme};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::panels::{Panel, Scale, panels};

/// The curves of each distribution, on a common logarithmic scale of errors in %.
pub fn chart(curves: &[(Draw, Vec<Point>)]) -> Markup {
    let legend = Scheme::ALL.map(|scheme| scheme.name().to_owned());
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
    let charts: Vec<Panel> = curves.iter().map(panel).collect();
    panels(&charts, &legend, "%", Scale::Logarithmic)
}

/// The page. Each distribution has points of all schemes in the order of [`Scheme::ALL`].
pub fn page(curves: &[(Draw, Vec<Point>)]) -> String {
    let legend = Scheme::ALL.map(Scheme::name);
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "FlashCore: 8-bit attention over the number of keys" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "8-bit attention over the number of keys" }
                p.soft {
                    "Error of O against attention in f64 on the same e4m3 inputs, in % of O (root mean square), "
                    "over the number of keys; the scale is logarithmic. Computed by the emulator's model of the tensor cores of sm_90, "
                    "for 16 queries of head dim 128; no kernel ran."
                }
                (chart(curves))
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
        }
    };
    markup.into_string()
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
        assert_eq!(text.matches("class=\"curve ").count(), 2 * Scheme::ALL.len(), "lines and their legend");
        assert_eq!(text.matches("<tr>").count(), 3);
        assert!(text.contains("two-level sums, 1024: 2.00 %"));
    }
}
