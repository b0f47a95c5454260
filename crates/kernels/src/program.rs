//! The result of emitting a plan: one or more kernels that are launched one after another.

use problem::Problem;
use ptx::{Access, Arg, BufferSpec, Kernel, Launch, TensorMapSpec, Verified};

use crate::Operand;
use crate::contract::span_bytes;

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
    /// The operand of each buffer, in order. Several buffers may have the same operand, except for tensors,
    /// the LSE and temporaries.
    pub operands: Vec<Operand>,
}

/// The launch contracts of a program's kernels, without the code.
#[derive(Clone, Debug, PartialEq)]
pub struct Contracts {
    /// The contract of the kernel that is launched first.
    pub first: Step,
    /// The contracts of the kernels that are launched after it, in order.
    pub then: Vec<Step>,
    /// As [`Program::operands`].
    pub operands: Vec<Operand>,
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
        let Contracts { first, then, operands } = contracts;
        let then = then.into_iter().map(|step| step.into_kernel(module.clone())).collect();
        Program { kernel: first.into_kernel(module), then, operands }
    }

    /// All kernels in launch order.
    pub fn steps(&self) -> impl Iterator<Item = &Kernel> {
        std::iter::once(&self.kernel).chain(&self.then)
    }

    /// Name and size in bytes of each temporary.
    pub fn temporaries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.operands.iter().zip(&self.kernel.buffers).filter_map(|(operand, buffer)| match operand {
            Operand::Temporary(name) => Some((*name, buffer.bytes)),
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
        let places = self.make_room(&next.operands, &next.first.buffers);
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
    fn make_room(&mut self, operands: &[Operand], buffers: &[BufferSpec]) -> Vec<usize> {
        let own = self.operands.len();
        let place = |(&operand, buffer): (&Operand, &BufferSpec)| {
            let known = self.operands[..own].iter().position(|&o| o == operand && o.is_shared());
            known.unwrap_or_else(|| {
                self.operands.push(operand);
                let unused = BufferSpec { access: Access::Read, ..buffer.clone() };
                self.steps_mut().for_each(|step| step.buffers.push(unused.clone()));
                self.operands.len() - 1
            })
        };
        operands.iter().zip(buffers).map(place).collect()
    }

    /// Sets the sizes of the buffers of tensors and descale factors to the span of the strides of `problem`.
    pub(crate) fn span_tensors_of(&mut self, problem: &Problem) {
        let Contracts { first, then, operands } = self;
        for step in std::iter::once(first).chain(then) {
            for (buffer, operand) in step.buffers.iter_mut().zip(&*operands) {
                match *operand {
                    Operand::Tensor(tensor) => buffer.bytes = span_bytes(problem, tensor),
                    Operand::Descale(tensor) => buffer.bytes = 4 * problem.scale_len(tensor),
                    _ => {}
                }
            }
        }
    }
}
