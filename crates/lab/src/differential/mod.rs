//! The emulator's tensor cores against a machine's, bit for bit, on random fragments.

mod kernel;
mod matrices;

use emu::numerics::tensor::wmma::WmmaKind;
use emu::numerics::tensor::{self, Distribution, MmaKind, TensorRules};
use ptx::{Kernel, Machine, Module, Target};
use rayon::prelude::*;
use serde::Serialize;

pub use matrices::Matrices;

/// Warps per CTA; a batch is a multiple of it.
const WARPS_PER_CTA: u64 = 4;

/// Fragments in one launch: enough to fill a large GPU, little enough for its buffers to stay near 100 MB.
const BATCH: u64 = 32_768;

/// What is put through both machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// One `mma.sync` on random registers.
    Mma(MmaKind),
    /// Loads, product and store of `wmma` on random matrices in memory.
    Wmma(Matrices),
}

/// A, B, C and D of one fragment in memory.
type Operands = [Vec<u8>; 4];

impl Subject {
    /// Everything that exists on an architecture.
    pub fn all(rules: TensorRules) -> Vec<Subject> {
        let mma = MmaKind::all().into_iter().filter(|kind| kind.check(rules).is_ok()).map(Subject::Mma);
        mma.chain(WmmaKind::all().into_iter().flat_map(Matrices::orders).map(Subject::Wmma)).collect()
    }

    /// The module, in which each warp takes a fragment, and the instruction in question.
    fn module(self, target: Target) -> (Module, String) {
        match self {
            Subject::Mma(kind) => kernel::module(kind, target),
            Subject::Wmma(matrices) => matrices.module(target),
        }
    }

    /// Bytes of A, B, C and D of a fragment.
    fn bytes(self) -> [usize; 4] {
        match self {
            Subject::Mma(kind) => kernel::bytes(kind),
            Subject::Wmma(matrices) => matrices.bytes(),
        }
    }

    /// Bytes of one result.
    fn width(self) -> usize {
        match self {
            Subject::Mma(kind) => kernel::register_bytes(kind),
            Subject::Wmma(matrices) => matrices.width(),
        }
    }

    /// A random fragment, and what the emulator makes of it.
    fn draw(
        self,
        rules: TensorRules,
        distribution: Distribution,
        seed: u64,
    ) -> Result<Operands, tensor::MmaError> {
        match self {
            Subject::Mma(kind) => kernel::draw(kind, rules, distribution, seed),
            Subject::Wmma(matrices) => matrices.draw(rules, distribution, seed),
        }
    }
}

/// The outcome for one subject.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The instruction's mnemonic.
    pub instruction: String,
    /// Fragments compared.
    pub fragments: u64,
    /// 32-bit or 64-bit result registers compared (lanes × registers), or elements of D.
    pub results: u64,
    /// Results whose bits differ.
    pub differing: u64,
    /// The first difference.
    pub first: Option<Difference>,
}

/// One result that differs.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// How the fragment was drawn.
    pub distribution: String,
    /// Its seed.
    pub seed: u64,
    /// Which result: 32·register + lane, or the element of D in the order of memory.
    pub result: usize,
    /// The emulator's bits.
    pub emulated: String,
    /// The machine's bits.
    pub machine: String,
}

/// Why two machines could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError<E: std::error::Error> {
    /// The machine failed.
    #[error("{instruction}: {source}")]
    Machine {
        /// The instruction.
        instruction: String,
        /// What the machine said.
        source: E,
    },
    /// The emulator refused the instruction.
    #[error(transparent)]
    Emulator(#[from] tensor::MmaError),
}

/// Compares `fragments` random fragments (rounded up to whole batches) of one subject, an equal share from each
/// distribution.
///
/// # Errors
/// When the machine fails or the emulator does not have the instruction.
pub fn compare<M: Machine>(
    machine: &mut M,
    target: Target,
    rules: TensorRules,
    subject: Subject,
    fragments: u64,
) -> Result<Comparison, CompareError<M::Error>> {
    let (module, instruction) = subject.module(target);
    let batch = BATCH.min(fragments.next_multiple_of(WARPS_PER_CTA));
    let kernel = kernel::launch(subject.bytes(), module, batch);
    let failed = |source| CompareError::Machine { instruction: instruction.clone(), source };
    let mut buffers = Vec::new();
    for spec in &kernel.buffers {
        buffers.push(machine.allocate(spec.bytes).map_err(failed)?);
    }
    let mut comparison =
        Comparison { instruction: instruction.clone(), fragments: 0, results: 0, differing: 0, first: None };
    let mut batch_data = Batch::new(&kernel, subject, batch);
    for (round, first_seed) in (0..fragments).step_by(batch as usize).enumerate() {
        let distribution = Distribution::ALL[round % Distribution::ALL.len()];
        batch_data.draw(rules, distribution, first_seed)?;
        for (buffer, bytes) in buffers.iter_mut().zip(&batch_data.inputs) {
            machine.upload(buffer, bytes).map_err(failed)?;
        }
        let mut handles: Vec<&mut M::Buffer> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut handles).map_err(failed)?;
        machine.download(&buffers[3], &mut batch_data.results).map_err(failed)?;
        comparison.fragments += batch;
        comparison.results += batch_data.results.len() as u64 / batch_data.width as u64;
        for difference in batch_data.differences(distribution, first_seed) {
            comparison.differing += 1;
            comparison.first.get_or_insert(difference);
        }
    }
    Ok(comparison)
}

/// One launch's fragments, one after the other.
struct Batch {
    subject: Subject,
    inputs: [Vec<u8>; 3],
    expected: Vec<u8>,
    results: Vec<u8>,
    /// Bytes of one result.
    width: usize,
}

impl Batch {
    fn new(kernel: &Kernel, subject: Subject, batch: u64) -> Batch {
        let bytes = |i: usize| kernel.buffers[i].bytes;
        debug_assert_eq!(bytes(3), subject.bytes()[3] * batch as usize);
        Batch {
            subject,
            inputs: [0, 1, 2].map(|i| vec![0; bytes(i)]),
            expected: vec![0; bytes(3)],
            results: vec![0; bytes(3)],
            width: subject.width(),
        }
    }

    /// Draws every fragment and computes what the emulator says of it.
    fn draw(
        &mut self,
        rules: TensorRules,
        distribution: Distribution,
        first_seed: u64,
    ) -> Result<(), tensor::MmaError> {
        let subject = self.subject;
        let [a, b, c] = &mut self.inputs;
        let [sa, sb, sc, sd] = subject.bytes();
        let places = a.par_chunks_mut(sa).zip(b.par_chunks_mut(sb)).zip(c.par_chunks_mut(sc));
        places.zip(self.expected.par_chunks_mut(sd)).enumerate().try_for_each(|(i, (((a, b), c), d))| {
            let drawn = subject.draw(rules, distribution, first_seed + i as u64)?;
            for (to, from) in [a, b, c, d].into_iter().zip(&drawn) {
                to.copy_from_slice(from);
            }
            Ok(())
        })
    }

    /// Where the machine's results differ, in order of seed and place.
    fn differences(&self, distribution: Distribution, first_seed: u64) -> Vec<Difference> {
        let (stride, width) = (self.subject.bytes()[3], self.width);
        let of_fragment = |(i, (want, have)): (usize, (&[u8], &[u8]))| {
            let pairs = want.chunks_exact(width).zip(have.chunks_exact(width)).enumerate();
            let differing = if want == have { 0 } else { usize::MAX };
            pairs
                .take(differing)
                .filter(|(_, (want, have))| want != have)
                .map(|(place, (want, have))| Difference {
                    distribution: format!("{distribution:?}"),
                    seed: first_seed + i as u64,
                    result: place,
                    emulated: hex(want),
                    machine: hex(have),
                })
                .collect::<Vec<_>>()
        };
        let pairs = self.expected.par_chunks(stride).zip(self.results.par_chunks(stride));
        pairs.enumerate().flat_map_iter(of_fragment).collect()
    }
}

fn hex(little_endian: &[u8]) -> String {
    little_endian.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use emu::Emulator;

    use super::*;

    /// The kernels run in the emulator as on a GPU, and loads, products and stores there agree with the bare numbers.
    #[test]
    fn the_emulator_agrees_with_itself() {
        let mut compared = 0;
        for subject in Subject::all(TensorRules::Ampere) {
            let comparison =
                compare(&mut Emulator::default(), Target::sm(80), TensorRules::Ampere, subject, 24).unwrap();
            assert_eq!(comparison.differing, 0, "{}: {:?}", comparison.instruction, comparison.first);
            assert!(comparison.results > 0);
            compared += 1;
        }
        assert!(compared > 60, "{compared}");
    }
}
