//! How long a run holds its device: from the first use to the last. What its tasks have of that is told with their answers; the rest, in
//! which the device was held and waited, is kept in the ledger beside them.

/// What the rest is called in the ledger.
pub(super) const WAITED: &str = "between tasks";
/// Seconds of it that a crash may lose.
const UNWRITTEN: f64 = 10.0;

/// Of one process that drives the run, by its clock, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Holding {
    since: Option<f64>,
    until: f64,
    /// What of it the ledger has.
    counted: f64,
}

impl Holding {
    /// A task is to have the device.
    pub(super) fn begin(&mut self, now: f64) {
        self.since.get_or_insert(now);
    }

    /// A task had it, for so many seconds.
    pub(super) fn end(&mut self, now: f64, device_seconds: f64) {
        self.until = self.until.max(now);
        self.counted += device_seconds;
    }

    /// Seconds in which it waited that are not counted yet, where these are enough to be written, or `all` are to be; from now on they
    /// count.
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
        // Of 21 s tasks had 5.5.
        assert_eq!(holding.waited(false), Some(15.5));
        assert_eq!(holding.waited(true), None, "once");
        holding.end(25.0, 0.25);
        assert_eq!(holding.waited(true), Some(0.75));
        // Several devices at a time: nobody waited.
        holding.end(26.0, 9.0);
        assert_eq!(holding.waited(true), None);
    }
}
