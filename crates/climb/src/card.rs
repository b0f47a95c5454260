//! Times the rungs on a device, in turns, for a comparison with the model's predictions.

use bench::gpu::{Workbench, WorkbenchError};
use bench::schedule::palindrome;
use bench::{median, quantile};
use check::gate::{Feed, GateError};
use check::launchfile::Bound;
use judge::inputs::Style;
use judge::outputs::ErrorFigures;

/// A device that runs and times kernels: a GPU, or a substitute in a test. Kernels are known by number, in
/// the order of preparation.
pub trait Card {
    /// The error of a single kernel.
    type Error: std::fmt::Display;

    fn name(&self) -> &str;

    /// Loads a kernel and allocates its buffers with the given contents.
    ///
    /// # Errors
    /// When the device rejects the kernel.
    fn prepare(&mut self, bound: &Bound, contents: &[Vec<u8>]) -> Result<(), Self::Error>;

    /// Mean time of a launch, µs, over `calls` launches in a row.
    ///
    /// # Errors
    /// When the device fails.
    fn time(&mut self, number: usize, calls: u32) -> Result<f64, Self::Error>;

    /// The contents of a kernel's buffers.
    ///
    /// # Errors
    /// When the device fails.
    fn contents(&mut self, number: usize) -> Result<Vec<Vec<u8>>, Self::Error>;
}

/// The measurements of a rung on a device.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Measured {
    /// Every sample, µs per launch, with the inputs in L2.
    pub samples: Vec<f64>,
    /// Number of launches in a sample.
    pub calls: u32,
    /// The error of the outputs on the device.
    pub error: Option<ErrorFigures>,
    /// Why there are no samples.
    pub failure: Option<String>,
}

impl Measured {
    /// The median of the samples; `None` without samples.
    pub fn us(&self) -> Option<f64> {
        Some(median(&self.samples)).filter(|us| us.is_finite())
    }

    /// The 5 % and 95 % quantiles of the samples, µs.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.us().map(|_| (quantile(&self.samples, 0.05), quantile(&self.samples, 0.95)))
    }
}

/// Number of rounds, of two turns each.
const ROUNDS: u64 = 8;
/// Target duration of a sample, µs, with at most `MOST_CALLS` launches.
const SAMPLE_US: f64 = 2000.0;
const MOST_CALLS: f64 = 20.0;
const SEED: u64 = 1;

/// Measures kernels in turns. A kernel that the device rejects gets a failure, and the others are measured.
///
/// # Errors
/// When the oracle rejects a problem.
pub fn measure<C: Card>(card: &mut C, kernels: &[&Bound]) -> Result<Vec<Measured>, GateError> {
    let mut measured = vec![Measured::default(); kernels.len()];
    // The numbers of the accepted kernels on the device.
    let (mut numbers, mut taken) = (vec![None; kernels.len()], 0);
    // Every kernel accepts normally distributed inputs, quantised ones too.
    let feeds: Vec<Option<Feed>> =
        kernels.iter().map(|bound| Feed::draw(bound, Style::Normal, SEED)).collect();
    for (index, (bound, feed)) in kernels.iter().zip(&feeds).enumerate() {
        let buffers = feed.iter().flat_map(|feed| feed.buffers(bound));
        match card.prepare(bound, &buffers.map(|buffer| buffer.to_bytes()).collect::<Vec<_>>()) {
            Ok(()) => {
                numbers[index] = Some(taken);
                taken += 1;
            }
            Err(error) => measured[index].failure = Some(error.to_string()),
        }
    }
    for (index, (bound, feed)) in kernels.iter().zip(&feeds).enumerate() {
        let (Some(number), Some(feed)) = (numbers[index], feed) else { continue };
        let first = card.time(number, 1).and_then(|us| Ok((us, card.contents(number)?)));
        match first {
            Ok((us, after)) => {
                measured[index].calls = (SAMPLE_US / us).clamp(1.0, MOST_CALLS) as u32;
                let references = feed.references(bound)?;
                measured[index].error = references.and_then(|r| feed.judge(bound, &r, &after));
            }
            Err(error) => measured[index].failure = Some(error.to_string()),
        }
    }
    for round in 0..ROUNDS {
        for index in palindrome(kernels.len(), SEED, round) {
            let (Some(number), None) = (numbers[index], &measured[index].failure) else { continue };
            match card.time(number, measured[index].calls) {
                Ok(us) => measured[index].samples.push(us),
                Err(error) => measured[index].failure = Some(error.to_string()),
            }
        }
    }
    Ok(measured)
}

impl Card for Workbench {
    type Error = WorkbenchError;

    fn name(&self) -> &str {
        &self.info().name
    }

    fn prepare(&mut self, bound: &Bound, contents: &[Vec<u8>]) -> Result<(), WorkbenchError> {
        Workbench::prepare(self, bound, contents)
    }

    fn time(&mut self, number: usize, calls: u32) -> Result<f64, WorkbenchError> {
        Workbench::time(self, number, calls)
    }

    fn contents(&mut self, number: usize) -> Result<Vec<Vec<u8>>, WorkbenchError> {
        Workbench::contents(self, number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use emu::Emulator;
    use kernels::Arch;
    use problem::{DType, Problem};
    use ptx::Machine;

    /// The emulator as a device whose clock counts instructions, without room for one of the kernels.
    struct Emulated {
        ready: Vec<(ptx::Kernel, Vec<emu::Buffer>)>,
        refuses: &'static str,
        turns: Vec<usize>,
    }

    impl Card for Emulated {
        type Error = String;

        fn name(&self) -> &str {
            "emulated"
        }

        fn prepare(&mut self, bound: &Bound, contents: &[Vec<u8>]) -> Result<(), String> {
            if bound.kernel.entry.contains(self.refuses) {
                return Err("no room".into());
            }
            let buffers = contents.iter().map(|bytes| emu::Buffer::from_bytes(bytes)).collect();
            self.ready.push((bound.kernel.clone(), buffers));
            Ok(())
        }

        fn time(&mut self, number: usize, calls: u32) -> Result<f64, String> {
            self.turns.push(number);
            let mut machine = Emulator::default();
            let (kernel, buffers) = &mut self.ready[number];
            machine.launch(kernel, &mut buffers.iter_mut().collect::<Vec<_>>()).map_err(|e| e.to_string())?;
            let steps = machine.last_report().map_or(0, |report| report.steps);
            Ok(steps as f64 + 100.0 / f64::from(calls))
        }

        fn contents(&mut self, number: usize) -> Result<Vec<Vec<u8>>, String> {
            Ok(self.ready[number].1.iter().map(emu::Buffer::to_bytes).collect())
        }
    }

    #[test]
    fn what_a_card_takes_is_measured_in_turns_and_judged() {
        let problem = Problem::new(1, 1, 64, 64, DType::F16);
        let all = super::super::rungs(&problem, &Arch::SM_80).unwrap();
        let pick = |name: &str| all.iter().find(|r| r.name == name).unwrap().whole.clone();
        let kernels = [pick("fused"), pick("phase4"), pick("u8_baseline")];
        let refuses = Box::leak(kernels[1].kernel.entry.clone().into_boxed_str());
        let mut card = Emulated { ready: Vec::new(), refuses, turns: Vec::new() };
        let measured = measure(&mut card, &kernels.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(measured[1].failure.as_deref(), Some("no room"));
        assert_eq!(measured[1].us(), None);
        for good in [&measured[0], &measured[2]] {
            assert_eq!((good.samples.len() as u64, &good.failure), (2 * ROUNDS, &None));
            assert_eq!(good.error.unwrap().reasons(), Vec::<String>::new());
            let (low, high) = good.range().unwrap();
            assert!(low <= good.us().unwrap() && good.us().unwrap() <= high);
        }
        assert!(measured[0].us() < measured[2].us());
        // The order of turns varies.
        let firsts: Vec<usize> = card.turns[2..].chunks(4).map(|turns| turns[0]).collect();
        assert!(firsts.contains(&0) && firsts.contains(&1), "{firsts:?}");
    }
}
