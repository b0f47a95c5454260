//! Compares the emulator's tensor cores with a machine's, bit for bit, on random fragments.
//!
//! A fragment is the result of a warp's `mma.sync`: up to 16 rows and 8 columns of D, each from a row of A, a
//! column of B and C. A `wmma` counts as one fragment although it is larger. A `wgmma` counts as the N/2
//! fragments of which it consists (see [`Product`]).

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

/// Warps per CTA: four cases of `mma.sync` or `wmma`, or one case of `wgmma`.
const WARPS_PER_CTA: u64 = 4;

/// Fragments per launch: enough to fill a large GPU, and few enough to keep the buffers near 100 MB.
const BATCH: u64 = 32_768;

/// An instruction that both machines execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// One `mma.sync` on random registers.
    Mma(MmaKind),
    /// Loads, product and store of `wmma` on random matrices in memory.
    Wmma(Matrices),
    /// One `wgmma` on random matrices in shared memory, or with A in registers.
    Wgmma(Product),
}

/// The bytes of A, B, C and D of one case.
type Operands = [Vec<u8>; 4];

impl Subject {
    /// All subjects that exist on an architecture.
    pub fn all(rules: TensorRules) -> Vec<Subject> {
        let mma = MmaKind::all().into_iter().filter(|kind| kind.check(rules).is_ok()).map(Subject::Mma);
        let wmma = WmmaKind::all().into_iter().flat_map(Matrices::orders).map(Subject::Wmma);
        let wgmma = if rules == TensorRules::Hopper { Product::all() } else { Vec::new() };
        mma.chain(wmma).chain(wgmma.into_iter().map(Subject::Wgmma)).collect()
    }

    /// Every N of `wgmma` with 8-bit floats, where [`Subject::all`] has a few N of each type.
    pub fn of_every_width() -> Vec<Subject> {
        Product::of_every_width().into_iter().map(Subject::Wgmma).collect()
    }

    /// The instruction and, for `wgmma`, the layout of its operands.
    pub fn instruction(self, target: Target) -> String {
        self.module(target).1
    }

    /// The module and its instruction. Each warp takes one case, or the four warps of a CTA take one
    /// together.
    fn module(self, target: Target) -> (Module, String) {
        match self {
            Subject::Mma(kind) => kernel::module(kind, target),
            Subject::Wmma(matrices) => matrices.module(target),
            Subject::Wgmma(product) => product.module(Target::of_device(target.sm)),
        }
    }

    fn fragments(self) -> u64 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => 1,
            Subject::Wgmma(product) => product.fragments() as u64,
        }
    }

    /// Cases per CTA of four warps.
    fn cases_per_cta(self) -> u64 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => WARPS_PER_CTA,
            Subject::Wgmma(_) => 1,
        }
    }

    fn shared(self) -> u32 {
        match self {
            Subject::Mma(_) | Subject::Wmma(_) => 0,
            Subject::Wgmma(product) => product.shared(),
        }
    }

    fn bytes(self) -> [usize; 4] {
        match self {
            Subject::Mma(kind) => kernel::bytes(kind),
            Subject::Wmma(matrices) => matrices.bytes(),
            Subject::Wgmma(product) => product.bytes(),
        }
    }

    fn width(self) -> usize {
        match self {
            Subject::Mma(kind) => kernel::register_bytes(kind),
            Subject::Wmma(matrices) => matrices.width(),
            Subject::Wgmma(_) => 4,
        }
    }

    /// A random case and the emulator's result for it.
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

/// The result for one subject.
#[derive(Clone, Debug, Serialize)]
pub struct InstructionComparison {
    /// The instruction's mnemonic and, for `wgmma`, the layout of its operands.
    pub instruction: String,
    /// Number of fragments compared, of 16 rows and 8 columns where a `wgmma` consists of several.
    pub fragments: u64,
    /// Number of result registers of 32 or 64 bits (lanes × registers), or of elements of D.
    pub results: u64,
    /// Number of results with different bits.
    pub differing: u64,
    pub first: Option<Difference>,
}

/// A result that differs.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The distribution of the case.
    pub distribution: String,
    pub seed: u64,
    /// Index of the result: by register of a warp's or warpgroup's threads, or by element of D in memory
    /// order.
    pub result: usize,
    pub emulated: String,
    pub machine: String,
}

#[derive(Debug, thiserror::Error)]
pub enum CompareError<E: std::error::Error> {
    #[error("{instruction}: {source}")]
    Machine { instruction: String, source: E },
    /// The verifier rejects the kernel around the instruction: a fault of the generator.
    #[error("{instruction}: the kernel breaks the rules of PTX: {violations}")]
    Generator { instruction: String, violations: Violations },
    /// The emulator does not support the instruction.
    #[error(transparent)]
    Emulator(#[from] tensor::MmaError),
}

/// Compares `fragments` random fragments of one subject (rounded up to whole launches), an equal share from
/// each distribution.
///
/// # Errors
/// When the machine fails or the emulator does not support the instruction.
pub fn compare<M: Machine>(
    machine: &mut M,
    target: Target,
    rules: TensorRules,
    subject: Subject,
    fragments: u64,
) -> Result<InstructionComparison, CompareError<M::Error>> {
    let (module, instruction) = subject.module(target);
    let cases = fragments.div_ceil(subject.fragments());
    // A multiple of the cases per CTA, and of the period after which a product has no C.
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
    let mut comparison = InstructionComparison {
        instruction: instruction.clone(),
        fragments: 0,
        results: 0,
        differing: 0,
        first: None,
    };
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

/// The cases of one launch.
struct Batch {
    subject: Subject,
    inputs: [Vec<u8>; 3],
    expected: Vec<u8>,
    results: Vec<u8>,
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

    /// Draws every case and computes the emulator's result.
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

    /// The differing results in the order of seed and position.
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

    /// The kernels run in the emulator as on a GPU. Loads, products and stores give the results of the direct
    /// computation.
    #[test]
    fn the_emulator_agrees_with_itself() {
        let subjects = Subject::all(TensorRules::Ampere);
        assert!(subjects.len() > 60);
        agree(80, TensorRules::Ampere, subjects, 24);
    }

    /// Descriptors lead the emulator to the places where the host put the operands.
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
