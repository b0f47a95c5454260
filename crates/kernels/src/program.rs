//! The result of emitting a plan: one or more kernels that are launched one after another.

use problem::Problem;
use ptx::{Access, Arg, Kernel, Violations};

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

impl Program {
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

    /// The program with the kernels of `next` appended. Both programs must have the same target, and their
    /// entries different names.
    ///
    /// # Errors
    /// When the verifier rejects the combined module.
    pub(crate) fn followed_by(mut self, next: Program) -> Result<Program, Violations> {
        let [own, added] = [&self.kernel, &next.kernel].map(|kernel| kernel.module.clone().into_module());
        let module = own.joined_with(added).verify()?;
        self.kernel.module = module.clone();
        self.then.iter_mut().for_each(|kernel| kernel.module = module.clone());
        let places = self.make_room(&next.operands, &next.kernel.buffers);
        for mut kernel in std::iter::once(next.kernel).chain(next.then) {
            let mut buffers = self.kernel.buffers.clone();
            buffers.iter_mut().for_each(|buffer| buffer.access = Access::Read);
            for (&place, buffer) in places.iter().zip(kernel.buffers) {
                buffers[place] = buffer;
            }
            kernel.buffers = buffers;
            for arg in &mut kernel.args {
                if let Arg::Buffer { index, .. } = arg {
                    *index = places[*index];
                }
            }
            kernel.tensor_maps.iter_mut().for_each(|map| map.buffer = places[map.buffer]);
            kernel.module = module.clone();
            self.then.push(kernel);
        }
        Ok(self)
    }

    /// The indices of another program's buffers in this program, to which missing buffers are added.
    fn make_room(&mut self, operands: &[Operand], buffers: &[ptx::BufferSpec]) -> Vec<usize> {
        let own = self.operands.len();
        let place = |(&operand, buffer): (&Operand, &ptx::BufferSpec)| {
            let known = self.operands[..own].iter().position(|&o| o == operand && o.is_shared());
            known.unwrap_or_else(|| {
                self.operands.push(operand);
                let unused = ptx::BufferSpec { access: Access::Read, ..buffer.clone() };
                let kernels = std::iter::once(&mut self.kernel).chain(&mut self.then);
                kernels.for_each(|kernel| kernel.buffers.push(unused.clone()));
                self.operands.len() - 1
            })
        };
        operands.iter().zip(buffers).map(place).collect()
    }

    /// Sets the sizes of tensor buffers to the span of the strides of `problem`.
    pub(crate) fn span_tensors_of(&mut self, problem: &Problem) {
        for kernel in std::iter::once(&mut self.kernel).chain(&mut self.then) {
            for (buffer, operand) in kernel.buffers.iter_mut().zip(&self.operands) {
                if let Operand::Tensor(tensor) = *operand {
                    buffer.bytes = span_bytes(problem, tensor);
                }
            }
        }
    }
}
