//! The emulator's tensor cores against a machine's, bit for bit, on random fragments.
//!
//! A fragment is what a warp's `mma.sync` computes: some 16 rows and 8 columns of D, each from a row of A, a column of B and its
//! C. A `wmma` is counted as one although it is larger; a `wgmma` as the N/2 that it consists of (see [`Product`]).

mod kernel;
mod matrices;
mod warpgroup;

use emu::numerics::tensor::wmma::WmmaKind;
use emu::numerics::tensor::{self, Distribution, MmaKind, TensorRules};
use ptx::{Kernel, Machine, Module, Target, Violations};
use rayon::prelude::*;
use serde::Serialize;

pub use matrices::Matrices;
pub use warpgroup::Product;

/// Warps per CTA: as many cases of `mma.sync` and `wmma`, and one of `wgmma`.
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
    /// One `wgmma` on random matrices in shared memory, or A in registers.
    Wgmma(Product),
}

/// A, B, C and D of one case in memory: of one instruction's execution.
type Operands = [Vec<u8>; 4];

impl Subject {
    /// Everything that exists on an architecture.
    pub fn all(rules: TensorRules) -> Vec<Subject> {
        let mma = MmaKind::all().into_iter().filter(|kind| kind.check(rules).is_ok()).map(Subject::Mma);
        let wmma = WmmaKind::all().into_iter().flat_map(Matrices::orders).map(Subject::Wmma);
        let wgmma = if rules == TensorRules::Hopper { Product::all() } else { Vec::new() };
        mma.chain(wmma).chain(wgmma.into_iter().map(Subject::Wgmma)).collect()
    }

    /// The instruction and, of `wgmma`, how its operands lie.
    pub fn instruction(self, target: Target) -> String {
        self.module(target).1
    }

    /// The module, in which each warp, or the four of a CTA, takes a case, and the instruction in question.
    fn module(self, target: Target) -> (Module, String) {
        match self {
            Subject::Mma(kind) => kernel::module(kind, target),
            Subject::Wmma(matrices) => matrices.module(target),
            Subject::Wgmma(product) => product.module(Target::sm_a(target.sm)),
        }
    }

    /// Fragments in a case.
    fn fragments(self) -> u64 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => 1,
            Subject::Wgmma(product) => product.fragments() as u64,
        }
    }

    /// Cases that a CTA of four warps takes.
    fn cases_per_cta(self) -> u64 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => WARPS_PER_CTA,
            Subject::Wgmma(_) => 1,
        }
    }

    /// Dynamic shared memory of a CTA.
    fn shared(self) -> u32 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => 0,
            Subject::Wgmma(product) => product.shared(),
        }
    }

    /// Bytes of A, B, C and D of a case.
    fn bytes(self) -> [usize; 4] {
        match self {
            Subject::Mma(kind) => kernel::bytes(kind),
            Subject::Wmma(matrices) => matrices.bytes(),
            Subject::Wgmma(product) => product.bytes(),
        }
    }

    /// Bytes of one result.
    fn width(self) -> usize {
        match self {
            Subject::Mma(kind) => kernel::register_bytes(kind),
            Subject::Wmma(matrices) => matrices.width(),
            Subject::Wgmma(_) => 4,
        }
    }

    /// A random case, and what the emulator makes of it.
    fn draw(
        self,
        rules: TensorRules,
        distribution: Distribution,
        seed: u64,
    ) -> Result<Operands, tensor::MmaError> {
        match self {
            Subject::Mma(kind) => kernel::draw(kind, rules, distribution, seed),
            Subject::Wmma(matrices) => matrices.draw(rules, distribution, seed),
            Subject::Wgmma(product) => product.draw(distribution, seed),
        }
    }
}

/// The outcome for one subject.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The instruction's mnemonic and, of `wgmma`, how its operands lie.
    pub instruction: String,
    /// Fragments compared: of 16 rows and 8 columns where a `wgmma` consists of several.
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
    /// How the case was drawn.
    pub distribution: String,
    /// Its seed.
    pub seed: u64,
    /// Which result: register by register those of a warp's or a warpgroup's threads, or elements of D in the order of memory.
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
    /// The verifier refuses the kernel around the instruction, a fault of ours.
    #[error("{instruction}: the kernel breaks the rules of PTX: {violations}")]
    Generator {
        /// The instruction.
        instruction: String,
        /// What is refused.
        violations: Violations,
    },
    /// The emulator refused the instruction.
    #[error(transparent)]
    Emulator(#[from] tensor::MmaError),
}

/// Compares `fragments` random fragments (rounded up to whole launches) of one subject, an equal share from each
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
    let cases = fragments.div_ceil(subject.fragments());
    // A multiple of what a CTA takes, and of the turns that products take in having a C.
    let batch = (BATCH / subject.fragments()).min(cases).next_multiple_of(WARPS_PER_CTA);
    let module = module
        .verify()
        .map_err(|violations| CompareError::Generator { instruction: instruction.clone(), violations })?;
    let kernel = kernel::launch(subject, module, batch);
    let failed = |source| CompareError::Machine { instruction: instruction.clone(), source };
    let mut buffers = Vec::new();
    for spec in &kernel.buffers {
        buffers.push(machine.allocate(spec.bytes).map_err(failed)?);
    }
    let mut comparison =
        Comparison { instruction: instruction.clone(), fragments: 0, results: 0, differing: 0, first: None };
    let mut batch_data = Batch::new(&kernel, subject, batch);
    for (round, first_seed) in (0..cases).step_by(batch as usize).enumerate() {
        let distribution = Distribution::ALL[round % Distribution::ALL.len()];
        batch_data.draw(rules, distribution, first_seed)?;
        for (buffer, bytes) in buffers.iter_mut().zip(&batch_data.inputs) {
            machine.upload(buffer, bytes).map_err(failed)?;
        }
        let mut handles: Vec<&mut M::Buffer> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut handles).map_err(failed)?;
        machine.download(&buffers[3], &mut batch_data.results).map_err(failed)?;
        comparison.fragments += batch * subject.fragments();
        comparison.results += batch_data.results.len() as u64 / batch_data.width as u64;
        for difference in batch_data.differences(distribution, first_seed) {
            comparison.differing += 1;
            comparison.first.get_or_insert(difference);
        }
    }
    Ok(comparison)
}

/// One launch's cases, one after the other.
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

    /// Draws every case and computes what the emulator says of it.
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
        let of_case = |(i, (want, have)): (usize, (&[u8], &[u8]))| {
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
        pairs.enumerate().flat_map_iter(of_case).collect()
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
        let subjects = Subject::all(TensorRules::Ampere);
        assert!(subjects.len() > 60);
        agree(80, TensorRules::Ampere, subjects, 24);
    }

    /// Descriptors in the emulator lead to where the host laid the operands out.
    #[test]
    fn the_emulator_agrees_with_itself_on_products_of_warpgroups() {
        let mut subjects = Subject::all(TensorRules::Hopper);
        subjects.retain(|subject| matches!(subject, Subject::Wgmma(_)));
        assert!(subjects.len() > 60);
        agree(90, TensorRules::Hopper, subjects, 4);
    }

    fn agree(sm: u32, rules: TensorRules, subjects: Vec<Subject>, fragments: u64) {
        for subject in subjects {
            let emulator = &mut Emulator::default();
            let comparison = compare(emulator, Target::sm(sm), rules, subject, fragments).unwrap();
            assert_eq!(comparison.differing, 0, "{}: {:?}", comparison.instruction, comparison.first);
            assert!(comparison.fragments >= fragments && comparison.results > 0);
        }
    }
}
