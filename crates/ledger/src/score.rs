//! Scores the forecasts of the time model and of people, and fits a correction for an author's later
//! forecasts.

use rusqlite::Row;
use serde::{Deserialize, Serialize};

use super::read::{parse, rows};
use super::write::{now, text};
use super::{CandidateId, Forecast, Ledger, LedgerError, Pair};
use bench::{median, quantile};
use check::forecast::Fit;

/// The score of an author's forecasts for a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub author: String,
    pub device: String,
    /// Number of scored forecasts with an outcome.
    pub count: usize,
    /// Median of forecast / measured. Above 1, forecasts are too long.
    pub bias: f64,
    /// Share of the measured times within the forecast interval.
    pub coverage: f64,
    /// Spearman's rank correlation; `None` if all forecasts or all measured times are equal.
    pub spearman: Option<f64>,
    /// Median of |forecast / measured − 1|.
    pub median_error: f64,
}

/// A correction of an author's forecasts for a device, affine in the logarithm:
/// `us ↦ exp(intercept) · us^slope`. It is fitted to the older half of the forecasts with outcomes and judged
/// on the newer half.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recalibration {
    pub author: String,
    pub device: String,
    pub slope: f64,
    /// Logarithm of the factor.
    pub intercept: f64,
    /// Lower end of the new interval, as a factor on the corrected time: 5 % of the older half's measured
    /// times lie below.
    pub low: f64,
    /// Upper end of the new interval, as a factor: 5 % of the older half's measured times lie above.
    pub high: f64,
    /// Number of pairs in the older half.
    pub calibrated_on: usize,
    /// The score of the newer half before the correction.
    pub before: Score,
    /// The score of the newer half after the correction.
    pub after: Score,
    /// Whether the correction improved the newer half: a smaller error, and at least as many times within the
    /// interval. Only then are later forecasts also stored with the correction, under another author name
    /// ([`Ledger::tell`]). The search itself uses the uncorrected forecasts.
    pub adopted: bool,
}

/// A forecast that a person added, with its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ByHand {
    pub id: i64,
    /// Time of the forecast, ms since 1970.
    pub at: i64,
    pub forecast: Forecast,
    /// The measured time, µs.
    pub measured_us: Option<f64>,
    /// The note on the outcome.
    pub note: Option<String>,
}

/// The number of newest forecasts with outcomes that are scored per author and device. The score shows the
/// current quality, and its cost does not grow with the ledger.
pub const SCORED: usize = 20_000;

/// Minimum number of pairs in each half of a recalibration.
const HALF: usize = 10;
/// Fraction of the older half that the new interval leaves out on each side.
const TAIL: f64 = 0.05;

impl Score {
    /// Computes the score from pairs of forecast and measured time.
    pub fn of(author: &str, device: &str, pairs: &[Pair]) -> Score {
        let times: Vec<(f64, f64)> = pairs.iter().map(|p| (p.us, p.measured_us)).collect();
        let ratios: Vec<f64> = times.iter().map(|(us, measured)| us / measured).collect();
        let within = pairs.iter().filter(|p| (p.low_us..=p.high_us).contains(&p.measured_us)).count();
        let fit = Fit::of(&times);
        // Ranks exist if the values differ.
        let varies = |of: fn(&(f64, f64)) -> f64| times.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]));
        let is_defined = varies(|pair| pair.0) && varies(|pair| pair.1);
        Score {
            author: author.to_owned(),
            device: device.to_owned(),
            count: fit.count,
            bias: if ratios.is_empty() { 1.0 } else { median(&ratios) },
            coverage: within as f64 / fit.count.max(1) as f64,
            spearman: is_defined.then_some(fit.spearman),
            median_error: fit.median_error,
        }
    }
}

impl Recalibration {
    /// Fits the correction to the older half of the pairs (oldest first) and judges it on the newer half.
    /// `None` when there are too few pairs.
    pub fn fit(author: &str, device: &str, pairs: &[Pair]) -> Option<Recalibration> {
        let (older, newer) = pairs.split_at(pairs.len() / 2);
        if older.len() < HALF {
            return None;
        }
        let (slope, intercept) = least_squares(older);
        let mut map = Recalibration {
            author: author.to_owned(),
            device: device.to_owned(),
            slope,
            intercept,
            low: 1.0,
            high: 1.0,
            calibrated_on: older.len(),
            before: Score::of(author, device, newer),
            after: Score::of(author, device, &[]),
            adopted: false,
        };
        let rest: Vec<f64> = older.iter().map(|p| p.measured_us / map.expected(p.us)).collect();
        map.low = quantile(&rest, TAIL).min(1.0);
        map.high = quantile(&rest, 1.0 - TAIL).max(1.0);
        let mapped: Vec<Pair> = newer
            .iter()
            .map(|p| {
                let [low_us, us, high_us] = map.apply(p.us);
                Pair { low_us, us, high_us, ..p.clone() }
            })
            .collect();
        map.after = Score::of(author, device, &mapped);
        // A map with a negative slope would reverse the order of candidates, whatever its errors.
        map.adopted = slope > 0.0
            && map.after.median_error < map.before.median_error
            && map.after.coverage >= map.before.coverage;
        Some(map)
    }

    fn expected(&self, us: f64) -> f64 {
        (self.intercept + self.slope * us.ln()).exp()
    }

    /// The corrected forecast: low, expected, high.
    pub fn apply(&self, us: f64) -> [f64; 3] {
        let us = self.expected(us);
        [us * self.low, us, us * self.high]
    }
}

impl Ledger {
    /// The scores of all authors for all devices, each over the author's newest [`SCORED`] forecasts.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn scores(&self) -> Result<Vec<Score>, LedgerError> {
        let mut authors = self.forecasters()?;
        authors.sort();
        authors
            .iter()
            .map(|(author, device)| Ok(Score::of(author, device, &self.pairs(author, device, SCORED)?)))
            .collect()
    }

    /// Fits and evaluates a correction of an author's forecasts for a device and stores it as a fact, adopted
    /// or not. The newest correction is the valid one. Returns `None` when too few forecasts have outcomes.
    ///
    /// # Errors
    /// When the ledger has no such device, or cannot be read or written.
    pub fn recalibrate(&self, author: &str, device: &str) -> Result<Option<Recalibration>, LedgerError> {
        let mut pairs = self.pairs(author, device, usize::MAX)?;
        pairs.reverse();
        let Some(map) = Recalibration::fit(author, device, &pairs) else { return Ok(None) };
        self.together(|l| {
            let device = l.device(device)?;
            l.insert(
                "INSERT INTO recalibration (at, author, device, slope, intercept, low, high, calibrated_on, held_out, adopted)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rusqlite::params![
                    now(),
                    author,
                    device,
                    map.slope,
                    map.intercept,
                    map.low,
                    map.high,
                    map.calibrated_on as i64,
                    text(&[&map.before, &map.after]),
                    map.adopted
                ],
            )
        })?;
        Ok(Some(map))
    }

    /// The newest correction of an author's forecasts for a device.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn recalibration(&self, author: &str, device: &str) -> Result<Option<Recalibration>, LedgerError> {
        let sql = "SELECT slope, intercept, low, high, calibrated_on, held_out, adopted FROM recalibration
           WHERE device = (SELECT id FROM device WHERE name = ?) AND author = ? ORDER BY id DESC LIMIT 1";
        self.row(sql, [device, author], |row| {
            let [before, after]: [Score; 2] = parse(row, 5)?;
            Ok(Recalibration {
                author: author.to_owned(),
                device: device.to_owned(),
                slope: row.get(0)?,
                intercept: row.get(1)?,
                low: row.get(2)?,
                high: row.get(3)?,
                calibrated_on: row.get::<_, i64>(4)?.max(0) as usize,
                before,
                after,
                adopted: row.get(6)?,
            })
        })
    }

    /// A corrected forecast of an author; `None` when no correction is adopted.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn recalibrated(
        &self,
        author: &str,
        device: &str,
        [_, us, _]: [f64; 3],
    ) -> Result<Option<[f64; 3]>, LedgerError> {
        let map = self.recalibration(author, device)?;
        Ok(map.filter(|map| map.adopted).map(|map| map.apply(us)))
    }

    /// Forecasts that people added, newest first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn by_hand(&self, limit: usize) -> Result<Vec<ByHand>, LedgerError> {
        let sql = format!("{BY_HAND} ORDER BY f.id DESC LIMIT ?");
        self.rows(&sql, [rows(limit)], by_hand)
    }

    /// The forecast with this number that a person added.
    ///
    /// # Errors
    /// When there is no such forecast, or the ledger cannot be read.
    pub fn forecast_by_hand(&self, number: i64) -> Result<ByHand, LedgerError> {
        let found = self.row(&format!("{BY_HAND} AND f.id = ?"), [number], by_hand)?;
        found.ok_or_else(|| self.unknown(format!("forecast {number} that someone added")))
    }

    /// Finds a device by the name that a user typed: an exact name in any case, or the only device whose name
    /// contains all the words.
    ///
    /// # Errors
    /// When no device or several match (the error lists the devices), or the ledger cannot be read.
    pub fn device_called(&self, name: &str) -> Result<String, LedgerError> {
        let devices = self.devices()?;
        if let Some(device) = devices.iter().find(|device| device.to_lowercase() == name.to_lowercase()) {
            return Ok(device.clone());
        }
        let mut named = Vec::new();
        for id in self.devices_named(name)? {
            named.extend(
                self.row("SELECT name FROM device WHERE id = ?", [id], |row| row.get::<_, String>(0))?,
            );
        }
        match named.as_slice() {
            [device] => Ok(device.clone()),
            several => {
                Err(self.unknown(format!("single device {name:?}; called so are: {}", several.join("; "))))
            }
        }
    }
}

/// Selects forecasts that people added.
const BY_HAND: &str = "SELECT f.id, f.at, f.candidate, f.hypothesis, f.author, d.name, p.shape, f.low_us, f.us, f.high_us, r.measured_us, o.note
   FROM forecast f JOIN device d ON d.id = f.device LEFT JOIN problem p ON p.id = f.problem
   LEFT JOIN pair r ON (r.author, r.device, r.forecast) = (f.author, f.device, f.id)
   LEFT JOIN forecast_outcome o ON o.forecast = f.id WHERE f.outcome IS NULL";

fn by_hand(row: &Row<'_>) -> rusqlite::Result<ByHand> {
    let shape: Option<String> = row.get(6)?;
    let forecast = Forecast {
        candidate: row.get::<_, Option<i64>>(2)?.map(CandidateId),
        hypothesis: row.get(3)?,
        author: row.get(4)?,
        device: row.get(5)?,
        problem: if shape.is_some() { Some(parse(row, 6)?) } else { None },
        low_us: row.get(7)?,
        us: row.get(8)?,
        high_us: row.get(9)?,
    };
    Ok(ByHand { id: row.get(0)?, at: row.get(1)?, forecast, measured_us: row.get(10)?, note: row.get(11)? })
}

/// Slope and intercept of ln(measured) over ln(forecast). The slope is 1 when all forecasts are equal.
fn least_squares(pairs: &[Pair]) -> (f64, f64) {
    let points: Vec<(f64, f64)> = pairs.iter().map(|p| (p.us.ln(), p.measured_us.ln())).collect();
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - x) * (p.0 - x)).sum();
    let slope = match spread {
        // Forecasts within 0.1 % of each other do not determine a slope.
        s if s < n * 1e-6 => 1.0,
        s => points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / s,
    };
    (slope, y - slope * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(us: f64, measured_us: f64) -> Pair {
        let candidate = None;
        Pair { forecast: 0, candidate, low_us: us * 0.9, us, high_us: us * 1.1, measured_us }
    }

    /// Pairs of times: measured from 10 to 1000 µs, and forecast by `of`.
    fn pairs(count: usize, of: impl Fn(usize, f64) -> f64) -> Vec<Pair> {
        let times = (0..count).map(|i| 10.0 * 100f64.powf(((i * 7) % count) as f64 / count as f64));
        times.enumerate().map(|(i, measured)| pair(of(i, measured), measured)).collect()
    }

    #[test]
    fn a_score_is_bias_coverage_order_and_error() {
        let score = Score::of("ada", "L4", &[pair(12.0, 10.0), pair(21.0, 20.0), pair(33.0, 30.0)]);
        assert_eq!((score.count, score.spearman), (3, Some(1.0)));
        assert!((score.bias - 1.1).abs() < 1e-12 && (score.median_error - 0.1).abs() < 1e-12, "{score:?}");
        assert!((score.coverage - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(Score::of("ada", "L4", &[]).count, 0);
    }

    #[test]
    fn a_rank_correlation_needs_two_ranks() {
        let score = |pairs: &[Pair]| Score::of("ada", "L4", pairs).spearman;
        assert_eq!(score(&[]), None);
        assert_eq!(score(&[pair(12.0, 10.0)]), None);
        assert_eq!(score(&[pair(12.0, 10.0), pair(12.0, 11.0)]), None);
        assert_eq!(score(&[pair(12.0, 10.0), pair(13.0, 9.0)]), Some(-1.0));
        let json = serde_json::json!(Score::of("ada", "L4", &[]));
        assert!(json["spearman"].is_null(), "{json}");
    }

    #[test]
    fn a_steady_error_is_mapped_away_and_its_interval_holds() {
        let wavering = |i: usize| 1.0 + 0.02 * ((i * 13 % 11) as f64 - 5.0) / 5.0;
        let biased = pairs(200, |i, us| 1.7 * us.powf(0.9) * wavering(i));
        let map = Recalibration::fit("model", "L4", &biased).unwrap();
        assert!(map.adopted && (map.slope - 1.0 / 0.9).abs() < 0.01, "{map:?}");
        assert!(map.after.median_error < 0.02 && map.before.median_error > 0.05, "{map:?}");
        assert!((map.after.bias - 1.0).abs() < 0.01 && map.after.coverage > 0.8, "{map:?}");
        assert_eq!(map.after.spearman, map.before.spearman, "order is kept");
    }

    /// In the older half the forecasts have a constant error, so the fitted interval is narrow. The newer
    /// half's errors vary and leave that interval.
    #[test]
    fn a_map_whose_interval_does_not_hold_is_not_adopted() {
        let wavering = |i: usize, us: f64| match (i < 100, i % 2) {
            (true, _) => us * 1.08,
            (false, 0) => us * 1.02,
            (false, _) => us * 1.09,
        };
        let map = Recalibration::fit("model", "L4", &pairs(200, wavering)).unwrap();
        assert!(map.after.median_error < map.before.median_error, "{map:?}");
        assert!(map.after.coverage < map.before.coverage && !map.adopted, "{map:?}");
    }

    #[test]
    fn a_map_that_does_not_help_on_what_it_has_not_seen_is_not_adopted() {
        let turning = |i: usize, us: f64| if i < 100 { us * 1.5 } else { us };
        let map = Recalibration::fit("model", "L4", &pairs(200, turning)).unwrap();
        assert!(!map.adopted && map.after.median_error > map.before.median_error, "{map:?}");
        let falling = Recalibration::fit("model", "L4", &pairs(200, |_, us| 1e4 / us)).unwrap();
        assert!(falling.slope < 0.0 && !falling.adopted, "{falling:?}");
        assert_eq!(Recalibration::fit("model", "L4", &pairs(19, |_, us| us)), None, "too few");
        let same = pairs(40, |_, _| 50.0);
        assert_eq!(Recalibration::fit("model", "L4", &same).unwrap().slope, 1.0);
    }
}
