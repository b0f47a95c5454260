//! The result of emitting a plan: one or more kernels that are launched one after another.

use problem::Problem;
use ptx::{Access, Arg, BufferSpec, Kernel, Launch, TensorMapSpec, Verified};

use crate::BufferKind;

/// The kernels of a plan, which one call launches in order, and the contents of their buffers.
///
/// All kernels are entries of one module and take the same buffers in the same order, so a machine binds the
/// buffers once. A kernel declares buffers that it does not use with [`Access::Read`]. Most programs have one
/// kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The kernel that is launched first.
    pub kernel: Kernel,
    /// The kernels that are launched after it, in order.
    pub then: Vec<Kernel>,
    /// The contents of each buffer, in order. Only counters and scratch memory can occur more than once.
    pub kinds: Vec<BufferKind>,
}

/// The launch contracts of a program's kernels, without the code.
#[derive(Clone, Debug, PartialEq)]
pub struct Contracts {
    /// The contract of the kernel that is launched first.
    pub first: Step,
    /// The contracts of the kernels that are launched after it, in order.
    pub then: Vec<Step>,
    /// As [`Program::kinds`].
    pub kinds: Vec<BufferKind>,
}

/// The launch contract of a kernel: a [`Kernel`] without its module.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Name of the `.entry` to launch.
    pub entry: String,
    /// The launch configuration.
    pub launch: Launch,
    /// The buffers that a launch takes, in order.
    pub buffers: Vec<BufferSpec>,
    /// The tensor maps that arguments refer to by index.
    pub tensor_maps: Vec<TensorMapSpec>,
    /// One value per parameter of the entry, in order.
    pub args: Vec<Arg>,
}

impl Step {
    fn into_kernel(self, module: Verified) -> Kernel {
        let Step { entry, launch, buffers, tensor_maps, args } = self;
        Kernel { module, entry, launch, buffers, tensor_maps, args }
    }
}

impl Program {
    /// The program of a module and the contracts of its entries.
    pub(crate) fn new(module: Verified, contracts: Contracts) -> Program {
        let Contracts { first, then, kinds } = contracts;
        let then = then.into_iter().map(|step| step.into_kernel(module.clone())).collect();
        Program { kernel: first.into_kernel(module), then, kinds }
    }

    /// All kernels in launch order.
    pub fn steps(&self) -> impl Iterator<Item = &Kernel> {
        std::iter::once(&self.kernel).chain(&self.then)
    }

    /// Name and size in bytes of each temporary.
    pub fn temporaries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.kinds.iter().zip(&self.kernel.buffers).filter_map(|(kind, buffer)| match kind {
            BufferKind::Temporary(name) => Some((*name, buffer.bytes)),
            _ => None,
        })
    }
}

impl Contracts {
    /// All contracts in launch order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        std::iter::once(&self.first).chain(&self.then)
    }

    fn steps_mut(&mut self) -> impl Iterator<Item = &mut Step> {
        std::iter::once(&mut self.first).chain(&mut self.then)
    }

    /// The contracts with those of `next` appended.
    pub(crate) fn followed_by(mut self, next: Contracts) -> Contracts {
        let places = self.make_room(&next.kinds, &next.first.buffers);
        for mut step in std::iter::once(next.first).chain(next.then) {
            let mut buffers = self.first.buffers.clone();
            buffers.iter_mut().for_each(|buffer| buffer.access = Access::Read);
            for (&place, buffer) in places.iter().zip(step.buffers) {
                buffers[place] = buffer;
            }
            step.buffers = buffers;
            for arg in &mut step.args {
                if let Arg::Buffer { index, .. } = arg {
                    *index = places[*index];
                }
            }
            step.tensor_maps.iter_mut().for_each(|map| map.buffer = places[map.buffer]);
            self.then.push(step);
        }
        self
    }

    /// The indices of another program's buffers in this program, to which missing buffers are added.
    fn make_room(&mut self, kinds: &[BufferKind], buffers: &[BufferSpec]) -> Vec<usize> {
        let own = self.kinds.len();
        let place = |(&kind, buffer): (&BufferKind, &BufferSpec)| {
            let known = self.kinds[..own].iter().position(|&known| known == kind && kind.is_shared());
            known.unwrap_or_else(|| {
                self.kinds.push(kind);
                let unused = BufferSpec { access: Access::Read, ..buffer.clone() };
                self.steps_mut().for_each(|step| step.buffers.push(unused.clone()));
                self.kinds.len() - 1
            })
        };
        kinds.iter().zip(buffers).map(place).collect()
    }

    /// Sets the sizes of the operands' buffers to those that they have in `problem`.
    pub(crate) fn size_operands_of(&mut self, problem: &Problem) {
        let Contracts { first, then, kinds } = self;
        for step in std::iter::once(first).chain(then) {
            for (buffer, kind) in step.buffers.iter_mut().zip(&*kinds) {
                if let Some(spec) = kind.operand().and_then(|operand| problem.operand(operand)) {
                    buffer.bytes = spec.bytes();
                }
            }
        }
    }
}
