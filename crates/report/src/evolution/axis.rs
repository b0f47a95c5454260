//! Axes of charts: positions of values, ticks and labels.

use maud::{Markup, html};

/// An axis from `low` at pixel `from` to `high` at pixel `to`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    scale: Scale,
}

/// Lines and labels at about `ticks` round values of each axis.
pub(super) fn grid(x: &Axis, y: &Axis, ticks: usize) -> Markup {
    html! {
        @for tick in x.ticks(ticks) {
            line.grid x1=(x.at(tick)) x2=(x.at(tick)) y1=(y.to) y2=(y.from) {}
            text.tick x=(x.at(tick)) y=(y.from + 16.0) text-anchor="middle" { (x.label(tick, ticks)) }
        }
        @for tick in y.ticks(ticks) {
            line.grid x1=(x.from) x2=(x.to) y1=(y.at(tick)) y2=(y.at(tick)) {}
            text.tick x=(x.from - 8.0) y=(y.at(tick) + 4.0) text-anchor="end" { (y.label(tick, ticks)) }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Log,
}

/// The ratio of a range's ends from which the axis is logarithmic.
const WIDE: f64 = 4.0;

impl Axis {
    /// A linear axis exactly from `low` to `high`.
    pub fn linear(low: f64, high: f64, from: f64, to: f64) -> Axis {
        let high = if high > low { high } else { low + 1.0 };
        Axis { low, high, from, to, scale: Scale::Linear }
    }

    /// An axis over times with some margin at both ends: linear for a narrow range, logarithmic for a wide
    /// one.
    pub fn over(times: impl Iterator<Item = f64>, from: f64, to: f64) -> Axis {
        let (low, high) = times
            .filter(|v| v.is_finite() && *v > 0.0)
            .fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low.is_finite() { (low, high) } else { (1.0, 2.0) };
        if high / low >= WIDE {
            let room = (high / low).powf(0.05);
            return Axis { low: low / room, high: high * room, from, to, scale: Scale::Log };
        }
        let room = (0.08 * (high - low)).max(0.005 * high);
        Axis { low: low - room, high: high + room, from, to, scale: Scale::Linear }
    }

    /// The pixel of a value. Values outside the axis are moved to its nearer end.
    pub fn at(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(1e-12) / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + part.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Whether the axis contains the value.
    pub fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// About `about` round values on the axis.
    pub fn ticks(&self, about: usize) -> Vec<f64> {
        if self.scale == Scale::Log {
            let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let of = |digits: &'static [f64]| -> Vec<f64> {
                let values = powers.clone().flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
                values.filter(|v| self.holds(*v)).collect()
            };
            // The labels of more ticks would touch.
            let fitting =
                [&[1.0, 2.0, 5.0][..], &[1.0, 3.0]].into_iter().map(of).find(|t| t.len() <= about + 1);
            return fitting.unwrap_or_else(|| of(&[1.0]));
        }
        let step = round_step((self.high - self.low) / about.max(1) as f64);
        let (first, last) = ((self.low / step).ceil() as i64, (self.high / step).floor() as i64);
        (first..=last).map(|i| i as f64 * step).collect()
    }

    /// Decimals that distinguish the ticks.
    pub fn decimals(&self, about: usize) -> usize {
        match self.scale {
            Scale::Log => 0,
            Scale::Linear => {
                let step = round_step((self.high - self.low) / about.max(1) as f64);
                (-step.log10() - 1e-9).ceil().max(0.0) as usize
            }
        }
    }

    /// The label of a tick.
    pub fn label(&self, tick: f64, about: usize) -> String {
        match self.scale {
            Scale::Log => plain(tick),
            Scale::Linear => format!("{tick:.*}", self.decimals(about)),
        }
    }
}

/// A step of 1, 2 or 5 times a power of ten, near `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.max(1e-12).log10().floor());
    // Some additional lines are acceptable; two lines are too few.
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|s| *s >= 0.7 * rough).unwrap_or(rough)
}

/// A round value without trailing zeros.
fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A pixel coordinate, rounded to a tenth.
pub(super) fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// A time with four digits: `6.042`, `151.3`, `2 345`.
pub(super) fn time(us: f64) -> String {
    match us {
        v if !v.is_finite() => "–".to_owned(),
        0.0 => "0".to_owned(),
        v if v >= 999.95 => grouped(v.round() as i64),
        v if v >= 99.995 => format!("{v:.1}"),
        v if v >= 9.9995 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// A count with thin spaces between thousands.
pub(super) fn grouped(count: impl Into<i128>) -> String {
    let digits = count.into().to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A ratio of times: `1.14×`.
pub(super) fn ratio(value: f64) -> String {
    match value {
        v if !v.is_finite() => "–".to_owned(),
        v if v >= 99.95 => format!("{v:.0}×"),
        v if v >= 9.995 => format!("{v:.1}×"),
        v if (0.9..1.1).contains(&v) => format!("{v:.3}×"),
        v => format!("{v:.2}×"),
    }
}

/// A share in per cent.
pub(super) fn percent(share: f64) -> String {
    match 100.0 * share {
        p if !p.is_finite() => "–".to_owned(),
        p if p != 0.0 && p.abs() < 0.995 => format!("{p:.2} %"),
        p if p != 0.0 && p.abs() < 9.95 => format!("{p:.1} %"),
        p => format!("{p:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_times_are_linear_and_distant_ones_logarithmic() {
        let close = Axis::over([6.0, 7.0].into_iter(), 0.0, 100.0);
        assert_eq!(
            close.ticks(5).iter().map(|t| close.label(*t, 5)).collect::<Vec<_>>(),
            ["6.0", "6.2", "6.4", "6.6", "6.8", "7.0"]
        );
        assert!(close.at(6.0) > 0.0 && close.at(7.0) < 100.0 && (close.at(6.5) - 50.0).abs() < 1e-9);
        let distant = Axis::over([1.0, 1000.0].into_iter(), 0.0, 100.0);
        assert!((distant.at(31.622_776_6) - 50.0).abs() < 1e-6);
        assert_eq!(
            distant.ticks(5).iter().map(|t| distant.label(*t, 5)).collect::<Vec<_>>(),
            ["1", "10", "100", "1000"]
        );
        // No value or a single one still gives an axis.
        assert!(!Axis::over(std::iter::empty(), 0.0, 1.0).ticks(5).is_empty());
        assert!(!Axis::over([3.0, 3.0].into_iter(), 0.0, 1.0).ticks(5).is_empty());
    }

    #[test]
    fn figures() {
        assert_eq!(
            [6.0421, 15.32, 151.34, 2345.6, f64::NAN].map(time),
            ["6.042", "15.32", "151.3", "2\u{202f}346", "–"]
        );
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
        );
        assert_eq!([1.004, 1.14, 12.3, 250.0].map(ratio), ["1.004×", "1.14×", "12.3×", "250×"]);
        assert_eq!([0.0, 0.0031, 0.034, 0.4].map(percent), ["0 %", "0.31 %", "3.4 %", "40 %"]);
    }
}
