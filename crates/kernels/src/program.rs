//! The result of emitting a plan: one module, and a list of launches of its entries.

use std::iter;

use problem::Problem;
use ptx::{Access, Arg, BufferSpec, Kernel, Launch, TensorMapSpec, Verified};

use crate::BufferKind;

/// A module with the launches of its entries, which one call enqueues in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The module that all steps share.
    pub module: Verified,
    /// The steps and their buffers.
    pub contracts: Contracts,
}

/// The launches of a program without the code.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contracts {
    /// The buffers of the program. A machine binds them once for all steps.
    pub buffers: Vec<ProgramBuffer>,
    /// The launches in order. Most programs have one.
    pub steps: Vec<Step>,
}

/// A buffer of a program. Only counters and scratch memory can occur more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramBuffer {
    /// The contents.
    pub kind: BufferKind,
    /// Size in bytes.
    pub bytes: usize,
}

/// The launch of one entry, which takes some of the program's buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Name of the `.entry` to launch.
    pub entry: String,
    /// The launch configuration.
    pub launch: Launch,
    /// The buffers that the step takes, by their index in [`Contracts::buffers`], and how it accesses them.
    pub takes: Vec<(usize, Access)>,
    /// The tensor maps that arguments refer to by index. They name buffers as `takes` does.
    pub tensor_maps: Vec<TensorMapSpec>,
    /// One value per parameter of the entry, in order. They name buffers as `takes` does.
    pub args: Vec<Arg>,
}

impl Program {
    /// The kernel of a step. It has all buffers of the program, so that the kernels of a program run with one
    /// list of buffers; those that the step does not take are declared with [`Access::Read`].
    ///
    /// # Panics
    /// When the program has no such step.
    pub fn kernel(&self, step: usize) -> Kernel {
        let step = &self.contracts.steps[step];
        let mut buffers: Vec<BufferSpec> = self.contracts.buffers.iter().map(ProgramBuffer::unused).collect();
        for &(index, access) in &step.takes {
            buffers[index].access = access;
        }
        Kernel {
            module: self.module.clone(),
            entry: step.entry.clone(),
            launch: step.launch,
            buffers,
            tensor_maps: step.tensor_maps.clone(),
            args: step.args.clone(),
        }
    }

    /// The kernels of all steps, in launch order.
    pub fn kernels(&self) -> Vec<Kernel> {
        (0..self.contracts.steps.len()).map(|step| self.kernel(step)).collect()
    }
}

impl ProgramBuffer {
    /// The buffer as a kernel that does not use it declares it.
    fn unused(&self) -> BufferSpec {
        BufferSpec { name: self.kind.name().to_owned(), bytes: self.bytes, access: Access::Read }
    }
}

impl Contracts {
    /// The contracts with those of `next` appended.
    pub(crate) fn followed_by(mut self, next: Contracts) -> Contracts {
        let own = self.buffers.len();
        let place = |buffer: ProgramBuffer| {
            let is_known = |known: &ProgramBuffer| known.kind == buffer.kind && buffer.kind.is_shared();
            if let Some(known) = self.buffers[..own].iter().position(is_known) {
                self.buffers[known].bytes = self.buffers[known].bytes.max(buffer.bytes);
                return known;
            }
            self.buffers.push(buffer);
            self.buffers.len() - 1
        };
        let places: Vec<usize> = next.buffers.into_iter().map(place).collect();
        self.steps.extend(next.steps.into_iter().map(|step| step.with_buffers_at(&places)));
        self
    }

    /// Sets the sizes of the operands' buffers to those that they have in `problem`.
    pub(crate) fn size_operands_of(&mut self, problem: &Problem) {
        for buffer in &mut self.buffers {
            if let Some(spec) = buffer.kind.operand().and_then(|operand| problem.operand(operand)) {
                buffer.bytes = spec.bytes();
            }
        }
    }
}

impl Step {
    /// The step in another program, which has the buffers of the step's program at `places`.
    fn with_buffers_at(mut self, places: &[usize]) -> Step {
        let of_args = self.args.iter_mut().filter_map(|arg| match arg {
            Arg::Buffer { index, .. } => Some(index),
            _ => None,
        });
        let of_maps = self.tensor_maps.iter_mut().map(|map| &mut map.buffer);
        let taken = self.takes.iter_mut().map(|(index, _)| index);
        iter::empty().chain(taken).chain(of_args).chain(of_maps).for_each(|index| *index = places[*index]);
        self
    }
}

#[cfg(test)]
mod tests {
    use problem::Operand;
    use ptx::{Builder, Dim3, Target};

    use super::*;

    /// The contract of a kernel that takes these buffers, all by address.
    fn step(entry: &str, takes: &[(BufferKind, Access)]) -> Contracts {
        let launch = Launch::new(Dim3(1, 1, 1), Dim3(32, 1, 1));
        let args = (0..takes.len()).map(|index| Arg::Buffer { index, offset: 0 }).collect();
        let buffers = (1..).zip(takes).map(|(n, &(kind, _))| ProgramBuffer { kind, bytes: 16 * n });
        let takes = takes.iter().enumerate().map(|(index, &(_, access))| (index, access)).collect();
        let step = Step { entry: entry.to_owned(), launch, takes, tensor_maps: Vec::new(), args };
        Contracts { buffers: buffers.collect(), steps: vec![step] }
    }

    /// Three steps take different buffers. Operands and temporaries are shared and have the largest size that
    /// a step states; each step has a counter of its own.
    #[test]
    fn steps_take_the_buffers_that_they_name() {
        use Access::{Read, ReadWrite, Write};
        use BufferKind::{Counter, Temporary};
        let [q, k, out] = [Operand::Q, Operand::K, Operand::OUT].map(BufferKind::from);
        let contracts = step("first", &[(q, Read), (Temporary("sums"), Write), (Counter, ReadWrite)])
            .followed_by(step("second", &[(Temporary("sums"), Read), (k, Read), (out, Write)]))
            .followed_by(step("third", &[(Counter, ReadWrite), (out, ReadWrite)]));
        let found: Vec<_> = contracts.buffers.iter().map(|buffer| (buffer.kind, buffer.bytes)).collect();
        let sums = Temporary("sums");
        assert_eq!(found, [(q, 16), (sums, 32), (Counter, 48), (k, 32), (out, 48), (Counter, 16)]);
        let module = Builder::kernel("first").into_verified(Target::sm(80)).unwrap();
        let kernels = Program { module, contracts }.kernels();
        let accesses =
            |kernel: &Kernel| kernel.buffers.iter().map(|buffer| buffer.access).collect::<Vec<_>>();
        assert_eq!(accesses(&kernels[0]), [Read, Write, ReadWrite, Read, Read, Read]);
        assert_eq!(accesses(&kernels[1]), [Read, Read, Read, Read, Write, Read]);
        assert_eq!(accesses(&kernels[2]), [Read, Read, Read, Read, ReadWrite, ReadWrite]);
        let used = |kernel: &Kernel| (0..6).filter(|&buffer| kernel.uses(buffer)).collect::<Vec<_>>();
        assert_eq!(kernels.iter().map(used).collect::<Vec<_>>(), [vec![0, 1, 2], vec![1, 3, 4], vec![4, 5]]);
    }
}
