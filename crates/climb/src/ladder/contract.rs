//! Builds the launch contract of a version: one call declares a parameter and its argument.

use check::launchfile::{Bound, Role};
use kernels::Arch;
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Arg, BufferSpec, Builder, F32, Global, Kernel, Launch, R32, Violations};

use super::RungKernel;

/// A launch contract under construction. Each method declares the kernel's next parameter and states its
/// argument.
pub(super) struct Contract<'a> {
    problem: &'a Problem,
    rung: RungKernel,
    buffers: Vec<BufferSpec>,
    roles: Vec<Role>,
    args: Vec<Arg>,
}

impl<'a> Contract<'a> {
    pub(super) fn new(problem: &'a Problem, rung: RungKernel) -> Contract<'a> {
        Contract { problem, rung, buffers: Vec::new(), roles: Vec::new(), args: Vec::new() }
    }

    /// The first element of a dense tensor.
    pub(super) fn tensor(&mut self, k: &mut Builder, tensor: Tensor) -> Global {
        let elements: usize = self.problem.extents(tensor).iter().product();
        let bytes = elements * self.problem.dtypes.of(tensor).bytes();
        let access = if tensor == Tensor::Out { Access::Write } else { Access::Read };
        self.buffer(k, tensor.name(), (bytes, access), Role::Operand(Operand::Tensor(tensor)))
    }

    /// The codes of an input, dense.
    pub(super) fn codes(&mut self, k: &mut Builder, tensor: Tensor) -> Global {
        let bytes = self.problem.extents(tensor).iter().product();
        self.buffer(k, &format!("{}_codes", tensor.name()), (bytes, Access::Read), Role::Codes(tensor))
    }

    /// The scales of the codes: one for each head of Q, then of K, then of V.
    pub(super) fn scales(&mut self, k: &mut Builder) -> Global {
        let heads = |tensor| self.problem.extents(tensor)[..2].iter().product::<usize>();
        let bytes = 4 * [Tensor::Q, Tensor::K, Tensor::V].map(heads).iter().sum::<usize>();
        self.buffer(k, "scales", (bytes, Access::Read), Role::Scales)
    }

    pub(super) fn u32(&mut self, k: &mut Builder, name: &str, value: u32) -> R32 {
        self.args.push(Arg::U32(value));
        k.param_u32(name)
    }

    pub(super) fn f32(&mut self, k: &mut Builder, name: &str, value: f32) -> F32 {
        self.args.push(Arg::F32(value));
        k.param_f32(name)
    }

    /// The kernel with this contract and the builder's code.
    pub(super) fn bind(self, k: Builder, arch: &Arch, launch: Launch) -> Result<Bound, Violations> {
        let Contract { problem, rung, buffers, roles, args } = self;
        let module = k.into_verified(arch.target())?;
        let entry = rung.name().to_owned();
        let kernel = Kernel { module, entry, launch, buffers, tensor_maps: Vec::new(), args };
        Ok(Bound::of_kernel(kernel, roles, Some(problem.clone())))
    }

    fn buffer(&mut self, k: &mut Builder, name: &str, of: (usize, Access), role: Role) -> Global {
        let ((bytes, access), index) = (of, self.buffers.len());
        self.buffers.push(BufferSpec { name: name.to_owned(), bytes, access });
        self.roles.push(role);
        self.args.push(Arg::Buffer { index, offset: 0 });
        k.param_pointer(name)
    }
}
