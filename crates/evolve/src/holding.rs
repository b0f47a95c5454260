//! Measures how long a run holds its device, from the first use to the last. Outcomes account for the tasks'
//! part. The remaining time, in which the device was held but idle, is written to the ledger separately.

/// The name of the idle time in the ledger.
pub(super) const WAITED: &str = "between tasks";
/// Idle seconds that a crash may lose.
const UNWRITTEN: f64 = 10.0;

/// The time for which one process holds the device, by its clock, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Holding {
    since: Option<f64>,
    until: f64,
    /// Seconds that are already in the ledger.
    counted: f64,
}

impl Holding {
    /// A task begins to use the device.
    pub(super) fn begin(&mut self, now: f64) {
        self.since.get_or_insert(now);
    }

    /// A task ends after using the device for `device_seconds`.
    pub(super) fn end(&mut self, now: f64, device_seconds: f64) {
        self.until = self.until.max(now);
        self.counted += device_seconds;
    }

    /// Takes the uncounted idle seconds if they exceed `UNWRITTEN` (or always, with `all`).
    pub(super) fn waited(&mut self, all: bool) -> Option<f64> {
        let held = (self.until - self.since?).max(0.0);
        let least = if all { f64::MIN_POSITIVE } else { UNWRITTEN };
        let rest = Some(held - self.counted).filter(|rest| *rest >= least);
        self.counted += rest.unwrap_or(0.0);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_held_from_the_first_use_to_the_last() {
        let mut holding = Holding::default();
        assert_eq!(holding.waited(true), None, "not held at all");
        holding.begin(3.0);
        holding.end(5.0, 1.5);
        assert_eq!(holding.waited(false), None, "half a second can wait");
        holding.begin(20.0);
        holding.end(24.0, 4.0);
        // Tasks had 5.5 of the 21 s.
        assert_eq!(holding.waited(false), Some(15.5));
        assert_eq!(holding.waited(true), None, "once");
        holding.end(25.0, 0.25);
        assert_eq!(holding.waited(true), Some(0.75));
        // Several devices were used at once, so there was no idle time.
        holding.end(26.0, 9.0);
        assert_eq!(holding.waited(true), None);
    }
}
