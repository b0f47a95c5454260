//! Charts as inline SVG without scripts or network access. Colours come from the page's style sheet, so that
//! they follow light and dark mode.

use maud::{Markup, html};

/// A bar: a name, a value with its uncertainty, and a marker for a quoted figure.
pub struct Bar<'a> {
    pub name: &'a str,
    /// The value; `None` leaves the row empty.
    pub value: Option<f64>,
    /// Ends of the uncertainty interval.
    pub range: Option<(f64, f64)>,
    pub quoted: Option<f64>,
    /// The meaning of the mark.
    pub mark: &'a str,
    /// CSS class: `passed`, `failed`, `incomplete` or `measured`.
    pub class: &'a str,
}

pub(super) const WIDTH: f64 = 760.0;
/// Width of a chart on a narrow screen.
const NARROW: f64 = 400.0;
const ROW: f64 = 26.0;
/// An upper estimate of the mean character width of names and values, because a file cannot measure a font.
pub(super) const CHARACTER: f64 = 7.0;

fn text_width(text: &str) -> f64 {
    CHARACTER * text.chars().count() as f64
}

/// The left end of the bars: right of the longest name.
fn start<'a>(names: impl Iterator<Item = &'a str>) -> f64 {
    names.map(text_width).fold(120.0, f64::max) + 16.0
}

impl Bar<'_> {
    /// The text right of the bar.
    fn label(&self) -> String {
        let figures = [self.value.map(short), self.quoted.map(|us| format!("◆ {}", short(us)))];
        figures.into_iter().flatten().collect::<Vec<_>>().join("  ")
    }
}

/// A logarithmic axis between two powers of ten.
struct Log {
    low: f64,
    high: f64,
}

impl Log {
    fn over(values: impl Iterator<Item = f64> + Clone) -> Log {
        let positive = values.filter(|v| v.is_finite() && *v > 0.0);
        let low = positive.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let high = positive.fold(0.0, f64::max).log10().ceil();
        if low.is_finite() && high > low { Log { low, high } } else { Log { low: 0.0, high: 1.0 } }
    }

    /// The fraction of the axis at a value.
    fn at(&self, value: f64) -> f64 {
        ((value.max(1e-12).log10() - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        (self.low as i32..=self.high as i32).map(|e| 10f64.powi(e)).collect()
    }
}

/// A figure in short form: `2.9k` for 2870.
pub fn short(value: f64) -> String {
    match value {
        v if v >= 9_999.5 => format!("{:.0}k", v / 1000.0),
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v if v >= 0.01 => format!("{v:.2}"),
        v => format!("{v:.1e}"),
    }
}

/// A chart in two widths, of which the page's style shows the one that fits the screen.
pub(super) fn in_both_widths(draw: impl Fn(f64) -> Markup) -> Markup {
    html! {
        div.roomy { (draw(WIDTH)) }
        div.narrow { (draw(NARROW)) }
    }
}

/// Horizontal bars on a logarithmic axis of microseconds.
pub fn bars(bars: &[Bar]) -> Markup {
    in_both_widths(|width| bars_within(bars, width))
}

/// Figures of one problem, a name and a value per library, each for a bar.
pub struct Compared {
    pub title: String,
    pub values: Vec<(String, f64)>,
}

/// The unit of the bars, and the value of a bar of the whole width; `None` for each problem's longest.
#[derive(Clone, Copy)]
pub struct Bars {
    pub unit: &'static str,
    pub full: Option<f64>,
}

/// Width of a chart in a file of its own: about that of a telephone's screen, which would show a wider chart
/// with smaller text.
const ALONE: f64 = 420.0;

/// Bars that start at 0, with their own figures, in one width, for a file of its own, whose text is as large
/// as the document's where there is room. The first library's bar is highlighted.
pub fn compared(problems: &[Compared], scale: Bars) -> Markup {
    let title_at =
        |i: usize| 30.0 * i as f64 + ROW * problems[..i].iter().map(|p| p.values.len()).sum::<usize>() as f64;
    let height = title_at(problems.len()) + 8.0;
    let start = start(problems.iter().flat_map(|p| &p.values).map(|(name, _)| name.as_str()));
    let span = ALONE - start - 70.0;
    html! {
        svg.chart viewBox=(format!("0 0 {ALONE} {height}")) width=(ALONE) height=(height) role="img" {
            @for (i, problem) in problems.iter().enumerate() {
                @let longest = problem.values.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
                @let full = scale.full.unwrap_or(longest);
                text.title x="10" y=(title_at(i) + 21.0) { (problem.title) }
                @for (j, (name, value)) in problem.values.iter().enumerate() {
                    @let y = title_at(i) + 30.0 + ROW * j as f64;
                    text.name x=(start - 8.0) y=(y + 17.0) text-anchor="end" { (name) }
                    rect class=(if j == 0 { "bar measured" } else { "bar peer" }) x=(start) y=(y + 4.0)
                        height=(ROW - 8.0) width=((value / full * span).max(1.0)) {}
                    text.value x=(start + value / full * span + 8.0) y=(y + 17.0) { (short(*value)) " " (scale.unit) }
                }
            }
        }
    }
}

fn bars_within(bars: &[Bar], width: f64) -> Markup {
    let values = bars.iter().flat_map(|b| [b.value, b.quoted, b.range.map(|r| r.0), b.range.map(|r| r.1)]);
    let axis = Log::over(values.flatten());
    let start = start(bars.iter().map(|bar| bar.name));
    // The space right of the longest bar is needed for its label.
    let room = bars.iter().map(|bar| text_width(&bar.label()) + 24.0).fold(70.0, f64::max);
    let x = |value: f64| start + axis.at(value) * (width - start - room);
    let height = ROW * bars.len() as f64 + 26.0;
    // Texts of neighbouring ticks would touch on a narrow chart.
    let spacing = (width - start - room) / (axis.high - axis.low);
    let every = if spacing < 55.0 { 2 } else { 1 };
    html! {
        svg.chart viewBox=(format!("0 0 {width} {height}")) role="img" {
            @for (i, tick) in axis.ticks().into_iter().enumerate() {
                line.grid x1=(x(tick)) x2=(x(tick)) y1="0" y2=(height - 20.0) {}
                @if i % every == 0 {
                    text.tick x=(x(tick)) y=(height - 6.0) text-anchor="middle" { (short(tick)) " µs" }
                }
            }
            @for (i, bar) in bars.iter().enumerate() {
                @let y = ROW * i as f64;
                text.name x=(start - 8.0) y=(y + 17.0) text-anchor="end" { (bar.name) }
                @if let Some(value) = bar.value {
                    rect class=(format!("bar {}", bar.class)) x=(start) y=(y + 4.0) height=(ROW - 8.0)
                        width=((x(value) - start).max(1.0)) {}
                    @let own = short(value);
                    @let low = bar.range.map_or(value, |(low, _)| low.min(value));
                    // The own figure stands in its own bar: right of the mark it would be read as the mark's.
                    @let fits = x(low) - start >= text_width(&own) + 12.0;
                    @if fits { text.inside x=(x(low) - 6.0) y=(y + 17.0) text-anchor="end" { (own) } }
                    // Right of everything in its row.
                    @let right = [bar.range.map(|r| r.1), bar.quoted].into_iter().flatten().fold(value, f64::max);
                    text.value x=(x(right) + 10.0) y=(y + 17.0) {
                        @if !fits { (own) }
                        @if let Some(quoted) = bar.quoted { tspan.quoted dx=(if fits { "0" } else { "8" }) { "◆ " (short(quoted)) } }
                    }
                }
                @if let Some((low, high)) = bar.range {
                    line.range x1=(x(low)) x2=(x(high)) y1=(y + ROW / 2.0) y2=(y + ROW / 2.0) {}
                }
                @if let Some(quoted) = bar.quoted {
                    path.quoted d=(diamond(x(quoted), y + ROW / 2.0, 6.0)) {
                        title { (bar.mark) ": " (short(quoted)) " µs" }
                    }
                }
            }
        }
    }
}

/// A chart as a separate file with the page's colours.
pub fn standalone(chart: &Markup) -> String {
    // The padding of a page would move the chart out of a file of its own.
    let style = concat!(include_str!("chart.css"), "svg.chart { padding: 0; }\n");
    let namespace = "<svg xmlns=\"http://www.w3.org/2000/svg\"";
    let chart = chart.clone().into_string().replacen("<svg", namespace, 1);
    chart.replacen('>', &format!("><style>{style}</style>"), 1) + "\n"
}

fn diamond(x: f64, y: f64, r: f64) -> String {
    format!("M{} {y}L{x} {}L{} {y}L{x} {}Z", x - r, y - r, x + r, y + r)
}

/// A part of a stacked bar.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub name: &'a str,
    /// Share of the bar.
    pub share: f64,
    pub colour: usize,
}

/// Bars split by cause.
pub fn stacked(rows: &[(&str, Vec<Part>)]) -> Markup {
    in_both_widths(|width| stacked_within(rows, width))
}

fn stacked_within(rows: &[(&str, Vec<Part>)], width: f64) -> Markup {
    let height = ROW * rows.len() as f64;
    let left = start(rows.iter().map(|(name, _)| *name));
    let span = width - left;
    html! {
        svg.chart viewBox=(format!("0 0 {width} {height}")) role="img" {
            @for (i, (name, parts)) in rows.iter().enumerate() {
                @let y = ROW * i as f64;
                text.name x=(left - 8.0) y=(y + 17.0) text-anchor="end" { (name) }
                @for (start, &Part { name, share, colour }) in starts(parts).into_iter().zip(parts) {
                    rect class=(format!("c{colour}")) x=(left + start * span) y=(y + 3.0) height=(ROW - 6.0)
                        width=(share * span) {
                        title { (name) ": " (format!("{:.1}", 100.0 * share)) " %" }
                    }
                    @if share * span > 22.0 {
                        text.part x=(left + (start + share / 2.0) * span) y=(y + 17.0) text-anchor="middle" {
                            (format!("{:.0}", 100.0 * share))
                        }
                    }
                }
            }
        }
    }
}

fn starts(parts: &[Part]) -> Vec<f64> {
    let running = parts.iter().scan(0.0, |sum, part| {
        let start = *sum;
        *sum += part.share;
        Some(start)
    });
    running.collect()
}

/// A point under the roofline.
pub struct Point<'a> {
    pub name: &'a str,
    /// FLOP per byte.
    pub intensity: f64,
    pub tflops: f64,
    pub class: &'a str,
}

/// A roofline of `peak` TFLOP/s over slopes of `dram` and `l2` TB/s, on logarithmic axes.
pub fn roofline(points: &[Point], peak: f64, dram: f64, l2: f64) -> Markup {
    in_both_widths(|width| roofline_within(points, peak, [dram, l2], width))
}

fn roofline_within(points: &[Point], peak: f64, [dram, l2]: [f64; 2], width: f64) -> Markup {
    let height = 340.0;
    let (left, right, top, bottom) = (60.0, width - 20.0, 12.0, height - 34.0);
    let ridge = peak / dram;
    let across = Log::over(points.iter().map(|p| p.intensity).chain([ridge, 10.0 * ridge]));
    let up = Log::over(points.iter().map(|p| p.tflops).chain([peak]));
    let x = |v: f64| left + across.at(v) * (right - left);
    let y = |v: f64| bottom - up.at(v) * (bottom - top);
    let (first, last) = (10f64.powf(across.low), 10f64.powf(across.high));
    let slope = |bandwidth: f64| {
        // The slope starts at the left edge or at the lower edge of the chart.
        let entry = first.max(10f64.powf(up.low) / bandwidth);
        format!("M{} {}L{} {}", x(entry), y(entry * bandwidth), x(peak / bandwidth), y(peak))
    };
    html! {
        svg.chart viewBox=(format!("0 0 {width} {height}")) role="img" {
            @for tick in across.ticks() {
                line.grid x1=(x(tick)) x2=(x(tick)) y1=(top) y2=(bottom) {}
                text.tick x=(x(tick)) y=(bottom + 17.0) text-anchor="middle" { (short(tick)) }
            }
            @for tick in up.ticks() {
                line.grid x1=(left) x2=(right) y1=(y(tick)) y2=(y(tick)) {}
                text.tick x=(left - 6.0) y=(y(tick) + 4.0) text-anchor="end" { (short(tick)) }
            }
            text.tick x=((left + right) / 2.0) y=(height - 4.0) text-anchor="middle" { "FLOP per byte of DRAM, or of L2 where DRAM is not touched" }
            text.tick x=(left + 6.0) y=(top + 10.0) { "TFLOP/s" }
            path.roof d=(format!("{}L{} {}", slope(dram), x(last), y(peak))) {}
            path.roof.l2 d=(format!("{}L{} {}", slope(l2), x(ridge), y(peak))) {}
            @for point in points {
                // A ring, so that a failed kernel and a passed one at the same place are both seen.
                @let (shape, r) = if point.class == "failed" { ("ring", "7") } else { ("dot", "4.5") };
                circle class=(format!("{shape} {}", point.class)) cx=(x(point.intensity)) cy=(y(point.tflops)) r=(r) {
                    title { (point.name) ": " (short(point.tflops)) " TFLOP/s" }
                }
            }
            @for Label { name, dot, at } in labels(points, |p| (x(p.intensity), y(p.tflops)), right, (top + bottom) / 2.0) {
                line.leader x1=(dot.0) y1=(dot.1) x2=(at.0) y2=(at.1) {}
                text.label x=(at.0 + 3.0) y=(at.1 + 4.0) { (name) }
            }
        }
    }
}

struct Label<'a> {
    name: &'a str,
    dot: (f64, f64),
    /// Where the name starts.
    at: (f64, f64),
}

/// Places names to the right of their points, and moves them until none covers another: downwards above
/// `middle`, upwards below it.
fn labels<'a>(
    points: &[Point<'a>],
    place: impl Fn(&Point) -> (f64, f64),
    right: f64,
    middle: f64,
) -> Vec<Label<'a>> {
    const LINE: f64 = 13.0;
    const DOT: f64 = 6.0;
    let mut dots: Vec<_> = points.iter().map(|p| (p.name, place(p))).collect();
    // From the edges inwards.
    dots.sort_by(|a, b| (b.1.1 - middle).abs().total_cmp(&(a.1.1 - middle).abs()));
    let mut placed: Vec<Label> = Vec::new();
    let all: Vec<(f64, f64)> = dots.iter().map(|(_, dot)| *dot).collect();
    for (name, dot) in dots {
        let inwards = if dot.1 > middle { -LINE } else { LINE };
        let x = (dot.0 + 14.0).min(right - text_width(name));
        // A name covers no other point and no other name.
        let on_a_point = |y: f64| {
            all.iter().any(|p| {
                *p != dot && (x - DOT..x + text_width(name)).contains(&p.0) && (y - p.1).abs() < 0.8 * LINE
            })
        };
        let taken = |y: f64| {
            on_a_point(y)
                || placed.iter().any(|other| {
                    let beside = x + text_width(name) < other.at.0 || other.at.0 + text_width(other.name) < x;
                    !beside && (y - other.at.1).abs() < LINE
                })
        };
        let steps = (0..).map(|step| dot.1 + f64::from(step) * inwards).take(2 * points.len());
        let y = steps.into_iter().find(|&y| !taken(y)).unwrap_or(dot.1);
        placed.push(Label { name, dot, at: (x, y) });
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_spans_its_values() {
        let axis = Log::over([12.0, 2870.0].into_iter());
        assert_eq!((axis.low, axis.high), (1.0, 4.0));
        assert_eq!(axis.ticks(), [10.0, 100.0, 1000.0, 10_000.0]);
        assert!((axis.at(100.0) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(Log::over(std::iter::empty()).ticks().len(), 2);
    }

    /// A failed and a passed kernel at the same place.
    #[test]
    fn a_failed_kernel_is_not_covered_by_a_passed_one() {
        let point = |name, class| Point { name, intensity: 1.0, tflops: 1.0, class };
        let points = [point("right", "passed"), point("wrong", "failed"), point("next", "passed")];
        let svg = roofline(&points, 100.0, 0.3, 2.0).into_string();
        // In both widths.
        assert_eq!(svg.matches(r#"<circle class="ring failed""#).count(), 2, "{svg}");
        assert_eq!(svg.matches(r#"<circle class="dot passed""#).count(), 4, "{svg}");
    }

    /// The figure of a long bar stands in the bar, and that of a short one right of it.
    #[test]
    fn a_figure_stands_at_its_own_bar() {
        let bar = |value, quoted| Bar {
            name: "n",
            value: Some(value),
            range: None,
            quoted,
            mark: "",
            class: "passed",
        };
        let svg = bars_within(&[bar(2000.0, Some(3000.0)), bar(1.5, None)], WIDTH).into_string();
        assert_eq!(svg.matches("class=\"inside\"").count(), 1, "{svg}");
        assert!(svg.contains("text-anchor=\"end\">2000</text>") && svg.contains(">◆ 3000</tspan>"), "{svg}");
        assert!(svg.contains("y=\"43\">1.50</text>"), "{svg}");
    }

    #[test]
    fn labels_do_not_cover_each_other() {
        let point = |name| Point { name, intensity: 1.0, tflops: 1.0, class: "passed" };
        let points = [point("a"), point("b"), point("c")];
        let mut heights: Vec<f64> =
            labels(&points, |_| (10.0, 10.0), 100.0, 50.0).iter().map(|label| label.at.1).collect();
        heights.sort_by(f64::total_cmp);
        assert!(heights.windows(2).all(|w| w[1] - w[0] >= 13.0), "{heights:?}");
    }

    /// Every bar starts at 0 of its problem's scale and has its own figure, and every text fits into the
    /// chart.
    #[test]
    fn compared_bars_are_linear_and_not_clipped() {
        let times = [("FlashCore", 5.0), ("a library with a long name, 1.2.3", 9_990.0)];
        let times: Vec<(String, f64)> = times.iter().map(|(name, us)| ((*name).to_owned(), *us)).collect();
        let problem = |scale: f64| Compared {
            title: "bf16 B16 H32/8 S16384×16384 D128 causal".to_owned(),
            values: times.iter().map(|(name, us)| (name.clone(), us * scale)).collect(),
        };
        let own = Bars { unit: "µs", full: None };
        let svg = compared(&[problem(1.0), problem(0.1)], own).into_string();
        let attribute = |text: &str, name: &str| -> f64 {
            let from = text.split_once(&format!("{name}=\"")).unwrap().1;
            from.split_once('"').unwrap().0.parse().unwrap()
        };
        let bars: Vec<&str> = svg.split("<rect ").skip(1).collect();
        let widths: Vec<f64> = bars.iter().map(|bar| attribute(bar, " width")).collect();
        assert_eq!((widths.len(), widths[1]), (4, widths[3]), "{svg}");
        let texts: Vec<&str> = svg.split("<text ").skip(1).collect();
        let of =
            |class: &'static str| texts.iter().filter(move |t| t.starts_with(&format!("class=\"{class}\"")));
        for (text, (name, us)) in of("name").zip(&times) {
            assert!(attribute(text, "x") >= text_width(name), "{text}");
            assert!(text.contains(name), "{text} {us}");
        }
        for (text, bar) in of("value").zip(&bars) {
            let end = attribute(bar, " x") + attribute(bar, " width");
            assert!(
                attribute(text, "x") >= end && attribute(text, "x") + text_width("9.99k µs") <= ALONE,
                "{text}"
            );
        }
        assert_eq!((of("name").count(), of("value").count()), (4, 4));
        let common = compared(&[problem(1.0)], Bars { unit: "TB/s", full: Some(19_980.0) }).into_string();
        assert!(common.contains("9990 TB/s") && !common.contains("µs"), "{common}");
        let longest = common.split("<rect ").nth(2).unwrap();
        assert!((attribute(longest, " width") - widths[1] / 2.0).abs() < 0.01, "{longest}");
        assert_eq!(compared(&[problem(0.0)], own).into_string().matches("<rect").count(), 2);
    }

    #[test]
    fn names_are_escaped() {
        let bar =
            Bar { name: "<script>", value: Some(1.0), range: None, quoted: None, mark: "", class: "passed" };
        let svg = bars(&[bar]).into_string();
        assert!(svg.contains("&lt;script&gt;") && !svg.contains("<script>"));
    }
}
