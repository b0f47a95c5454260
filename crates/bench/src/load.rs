//! Whether other work disturbs timings on this machine's CPU: time that the hypervisor gave to other
//! machines, time of other processes, involuntary context switches, and samples with two modes.

use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Share of the processor above which the time of other processes counts as a disturbance.
const OTHERS: f64 = 0.05;
/// Share of the processor above which the time of other machines, which the hypervisor gave to them, counts
/// as a disturbance.
const STEAL: f64 = 0.02;
/// Involuntary context switches per second of this process's CPU time. An undisturbed process has a few.
const SWITCHES: f64 = 100.0;

/// How much of the processor others used during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Duration of the observation, s.
    pub seconds: f64,
    /// Share of the processor's time that other processes used.
    pub others: f64,
    /// Share of the processor's time that the hypervisor gave to other machines.
    pub steal: f64,
    /// Involuntary context switches of this process per second of its CPU time.
    pub switches: f64,
}

impl Load {
    /// Whether timings on the machine are disturbed.
    pub fn is_busy(&self) -> bool {
        self.others > OTHERS || self.steal > STEAL || self.switches > SWITCHES
    }

    /// The load that disturbs timings, in words; `None` if there is none.
    pub fn words(&self) -> Option<String> {
        let percent = |share: f64| format!("{:.0} % of the processor's time", 100.0 * share);
        let mut parts = Vec::new();
        if self.others > OTHERS {
            parts.push(format!("other processes used {}", percent(self.others)));
        }
        if self.steal > STEAL {
            parts.push(format!("the hypervisor gave {} to other machines", percent(self.steal)));
        }
        if self.switches > SWITCHES {
            parts.push(format!("this process was interrupted {:.0} times a second", self.switches));
        }
        if parts.is_empty() { None } else { Some(parts.join(", ")) }
    }
}

/// The counters of the system at one moment. They are read on Linux only.
#[derive(Clone, Copy, Debug)]
pub struct LoadMeter {
    began: Instant,
    counters: Option<Counters>,
}

/// Ticks of the whole machine and of this process, and this process's involuntary switches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counters {
    busy: u64,
    idle: u64,
    steal: u64,
    own: u64,
    switches: u64,
}

/// Ticks per second of `/proc`, the same on every Linux architecture (`USER_HZ`).
const TICKS: f64 = 100.0;

impl LoadMeter {
    /// Begins an observation.
    pub fn start() -> LoadMeter {
        LoadMeter { began: Instant::now(), counters: Counters::now() }
    }

    /// The load since the beginning; `None` if the system has no counters, or too little time has passed.
    pub fn read(&self) -> Option<Load> {
        let (from, to) = (self.counters?, Counters::now()?);
        from.until(&to, self.began.elapsed().as_secs_f64())
    }
}

impl Counters {
    fn now() -> Option<Counters> {
        let machine = std::fs::read_to_string("/proc/stat").ok()?;
        let process = std::fs::read_to_string("/proc/self/stat").ok()?;
        let mut counters = Counters { own: own(&process)?, ..machine_wide(&machine)? };
        for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
            // A thread may end meanwhile.
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
            counters.switches += line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0);
        }
        Some(counters)
    }

    fn until(&self, to: &Counters, seconds: f64) -> Option<Load> {
        let passed = |of: fn(&Counters) -> u64| of(to).saturating_sub(of(self)) as f64;
        let [busy, idle, steal, own] =
            [passed(|c| c.busy), passed(|c| c.idle), passed(|c| c.steal), passed(|c| c.own)];
        let all = busy + idle + steal;
        // Too few ticks give no usable share.
        if all < 10.0 {
            return None;
        }
        let switches = if own > 0.0 { passed(|c| c.switches) / (own / TICKS) } else { 0.0 };
        let others = ((busy - own) / all).clamp(0.0, 1.0);
        Some(Load { seconds, others, steal: steal / all, switches })
    }
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guest time is part
/// of the user time.
fn machine_wide(stat: &str) -> Option<Counters> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
    let (busy, idle) = (at(0) + at(1) + at(2) + at(5) + at(6), at(3) + at(4));
    (ticks.len() >= 4).then_some(Counters { busy, idle, steal: at(7), ..Counters::default() })
}

/// User and system time of a process: fields 14 and 15 of its `stat`. The name before them may contain any
/// character.
fn own(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(fields.next()?.ok()? + fields.next()?.ok()?)
}

/// Minimum number of samples for a search for two modes.
const LEAST: usize = 12;
/// Minimum share of the smaller mode.
const SHARE: f64 = 0.15;
/// Minimum distance of the modes in units of their spread. The two halves of equally distributed samples lie
/// 3.5 apart, those of normal samples 2.7.
const APART: f64 = 5.0;
/// Minimum ratio of two modes, as a logarithm.
const GAP: f64 = 0.05;

/// The two modes of samples of time: the mean of each and the share of the slower one. `None` if the samples
/// have one mode. Two modes show that the machine was in two different states during the measurement.
pub fn two_modes(samples: &[f64]) -> Option<[f64; 3]> {
    let mut logs: Vec<f64> = samples.iter().filter(|us| **us > 0.0).map(|us| us.ln()).collect();
    if logs.len() < LEAST {
        return None;
    }
    logs.sort_by(f64::total_cmp);
    let least = ((SHARE * logs.len() as f64).ceil() as usize).max(2);
    let spread = |part: &[f64]| {
        let mean = part.iter().sum::<f64>() / part.len() as f64;
        (mean, part.iter().map(|x| (x - mean).powi(2)).sum::<f64>())
    };
    // The cut with the least squares within the two parts.
    let cuts = (least..=logs.len() - least).map(|at| {
        let (fast, slow) = (spread(&logs[..at]), spread(&logs[at..]));
        (fast.1 + slow.1, fast.0, slow.0, at)
    });
    let (within, fast, slow, at) = cuts.min_by(|a, b| a.0.total_cmp(&b.0))?;
    let deviation = (within / logs.len() as f64).sqrt();
    let is_apart = slow - fast > GAP && slow - fast > APART * deviation;
    is_apart.then(|| [fast.exp(), slow.exp(), (logs.len() - at) as f64 / logs.len() as f64])
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn the_counters_are_read_as_linux_writes_them() {
        let stat = "cpu  100 20 30 400 50 6 7 80 9 0\ncpu0 1 2 3 4\n";
        let counters = machine_wide(stat).unwrap();
        assert_eq!((counters.busy, counters.idle, counters.steal), (163, 450, 80));
        let process = "77 (a ) b) R 1 1 1 0 -1 4194304 120 0 0 0 31 11 0 0 20 0 1 0";
        assert_eq!((own(process), own(""), machine_wide("")), (Some(42), None, None));
        let to = Counters { busy: 263, idle: 550, steal: 100, own: 60, switches: 30 };
        let load = counters.until(&to, 1.0).unwrap();
        assert!((load.others - 40.0 / 220.0).abs() < 1e-9 && (load.steal - 20.0 / 220.0).abs() < 1e-9);
        assert!((load.switches - 50.0).abs() < 1e-9 && load.is_busy());
        let words = load.words().unwrap();
        assert!(words.contains("other processes used 18 %") && words.contains("gave 9 %"), "{words}");
        assert_eq!(counters.until(&counters, 1.0), None);
        let calm = Load { seconds: 1.0, others: 0.01, steal: 0.0, switches: 3.0 };
        assert_eq!((calm.is_busy(), calm.words()), (false, None));
    }

    #[test]
    fn this_process_is_not_counted_among_the_others() {
        let meter = LoadMeter::start();
        let until = Instant::now();
        let mut x = 1.0f64;
        while until.elapsed().as_secs_f64() < 0.3 {
            x = std::hint::black_box(x.sqrt() + 1.0);
        }
        if let Some(load) = meter.read() {
            let shares = [load.others, load.steal];
            assert!(
                shares.iter().all(|share| (0.0..=1.0).contains(share)) && load.seconds >= 0.3,
                "{load:?}"
            );
        }
    }

    #[test]
    fn two_modes_are_found_and_one_is_not_cut_in_two() {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut noisy = |middle: f64, spread: f64| middle * (1.0 + spread * (rng.random::<f64>() - 0.5));
        // Samples of a machine one of whose two virtual processors is sometimes used by another virtual
        // machine.
        let seen = [1795.0, 2535.0, 1804.0, 3560.0, 1837.0, 3469.0];
        let share = |i: usize| if i.is_multiple_of(3) { 3500.0 } else { 1800.0 };
        let samples: Vec<f64> = (0..24).map(|i| noisy(share(i), 0.1)).collect();
        let [fast, slow, share] = two_modes(&samples).unwrap();
        assert!((1700.0..1900.0).contains(&fast) && (3300.0..3700.0).contains(&slow) && share < 0.4);
        assert_eq!(two_modes(&seen), None); // too few
        for spread in [0.02, 0.2, 0.6] {
            let samples: Vec<f64> = (0..60).map(|_| noisy(1800.0, spread)).collect();
            assert_eq!(two_modes(&samples), None, "{spread}");
        }
        // One outlier does not form a mode.
        let mut samples: Vec<f64> = (0..30).map(|_| noisy(100.0, 0.02)).collect();
        samples[3] = 400.0;
        assert_eq!(two_modes(&samples), None);
        assert_eq!(two_modes(&[5.0; 40]), None);
    }
}
