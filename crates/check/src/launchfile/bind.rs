//! Binds a launch file to the module that it launches.

use kernels::{Operand, Program};
use problem::{Problem, Tensor};
use ptx::{Access, Arg, BufferSpec, Function, Kernel, Launch, Module, Param, TensorMapSpec, Verified};

use super::{ArgSpec, BufferType, Init, LaunchError, LaunchSpec, MapTarget, Memory};

/// The role of a kernel's buffer: what the gate fills in and what it judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand of a generated kernel. Inputs are drawn, `out` and the LSE are judged.
    Operand(Operand),
    /// Memory with given initial contents. Its final contents are not judged.
    Fill { dtype: BufferType, init: Init },
}

impl From<Operand> for Role {
    fn from(operand: Operand) -> Role {
        Role::Operand(operand)
    }
}

/// The kernels of a program with the roles of their buffers, which the gate can check.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The kernel that is launched first.
    pub kernel: Kernel,
    /// The kernels that are launched after it, in order. They are entries of the same module and take the
    /// same buffers.
    pub then: Vec<Kernel>,
    /// The role of each buffer in `kernel.buffers`.
    pub roles: Vec<Role>,
    /// The problem that the buffers belong to; `None` when only hazards are judged.
    pub problem: Option<Problem>,
    /// Whether the launch is cooperative: all CTAs are resident together.
    pub cooperative: bool,
}

impl Bound {
    /// A generated program. The module has the line numbers of its printed form, so that findings name lines.
    pub fn of_program(program: Program, problem: &Problem) -> Bound {
        let Program { kernel, then, operands } = program;
        let roles = operands.into_iter().map(Role::from).collect();
        Bound { kernel, then, roles, problem: Some(problem.clone()), cooperative: false }
    }

    /// One kernel whose buffers have these roles.
    pub fn of_kernel(kernel: Kernel, roles: Vec<Role>, problem: Option<Problem>) -> Bound {
        Bound { kernel, then: Vec::new(), roles, problem, cooperative: false }
    }

    /// All kernels in launch order.
    pub fn steps(&self) -> impl Iterator<Item = &Kernel> {
        std::iter::once(&self.kernel).chain(&self.then)
    }

    /// All kernels in launch order, to change them.
    pub fn steps_mut(&mut self) -> impl Iterator<Item = &mut Kernel> {
        std::iter::once(&mut self.kernel).chain(&mut self.then)
    }
}

impl LaunchSpec {
    /// Binds the launch file to a module.
    ///
    /// # Errors
    /// A [`LaunchError`] when the entry is missing or its parameters do not fit the arguments.
    pub fn bind(&self, module: Verified) -> Result<Bound, LaunchError> {
        let entry = self.pick_entry(&module)?;
        self.check_params(entry)?;
        let launch = Launch {
            grid: self.grid,
            cluster: self.cluster,
            block: self.block_for(entry)?,
            dynamic_shared: self.dynamic_shared,
            overlapping: false,
        };
        let mut contract = Contract::default();
        // The memory of each argument, before any map refers to another argument's.
        let homes: Vec<_> = (0..self.args.len()).map(|index| contract.home(self, index)).collect();
        for (arg, home) in self.args.iter().zip(&homes) {
            let value = match (arg, home) {
                (ArgSpec::Scalar(value), _) => *value,
                (ArgSpec::TensorMap(map), home) => {
                    let buffer = match map.target {
                        MapTarget::Argument(of) => homes.get(of).copied().flatten(),
                        MapTarget::Tensor(_) | MapTarget::Own(_) => *home,
                    };
                    contract.maps.push(map.in_buffer(buffer.unwrap_or(0)));
                    Arg::TensorMap { index: contract.maps.len() - 1 }
                }
                (_, home) => Arg::Buffer { index: home.unwrap_or(0), offset: 0 },
            };
            contract.args.push(value);
        }
        let entry = entry.name.to_string();
        let Contract { buffers, roles, maps: tensor_maps, args } = contract;
        let kernel = Kernel { tensor_maps, module, entry, launch, buffers, args };
        let bound = Bound::of_kernel(kernel, roles, self.problem.clone());
        Ok(Bound { cooperative: self.cooperative, ..bound })
    }

    fn pick_entry<'m>(&self, module: &'m Module) -> Result<&'m Function, LaunchError> {
        let accepted = || ptx::quote::list(module.entries().map(|f| &f.name));
        let mut entries = module.entries();
        match (&self.entry, entries.next()) {
            (_, None) => Err(LaunchError::NoEntry),
            (None, Some(only)) => match entries.next() {
                None => Ok(only),
                Some(_) => Err(LaunchError::AmbiguousEntry { accepted: accepted() }),
            },
            (Some(name), _) => module.entries().find(|f| *f.name == **name).ok_or_else(|| {
                let name = ptx::quote::cut(name).into_owned();
                LaunchError::UnknownEntry { name, accepted: accepted() }
            }),
        }
    }

    fn block_for(&self, entry: &Function) -> Result<ptx::Dim3, LaunchError> {
        let required = entry.bounds.required_threads.map(|[x, y, z]| ptx::Dim3(x, y, z));
        let Some(block) = self.block else {
            return required.ok_or_else(|| {
                LaunchError::value(
                    "launch.block",
                    "(missing)",
                    "[x, y, z]; the entry has no .reqntid to take it from",
                )
            });
        };
        if let Some(required) = required.filter(|&r| r != block) {
            let accepted = format!("{required}, the entry's .reqntid");
            return Err(LaunchError::value("launch.block", block, accepted));
        }
        if let Some([x, y, z]) = entry.bounds.max_threads {
            let most = ptx::Dim3(x, y, z);
            if block.count() > most.count() {
                let accepted = format!("at most {} threads, the entry's .maxntid", most.count());
                return Err(LaunchError::value("launch.block", block, accepted));
            }
        }
        Ok(block)
    }

    fn check_params(&self, entry: &Function) -> Result<(), LaunchError> {
        if entry.params.len() != self.args.len() {
            return Err(LaunchError::Count {
                entry: entry.name.to_string(),
                args: self.args.len(),
                params: entry.params.len(),
                list: ptx::quote::list(entry.params.iter().map(describe)),
            });
        }
        for (index, (arg, param)) in self.args.iter().zip(&entry.params).enumerate() {
            if !fits(arg, param) {
                return Err(LaunchError::Mismatch {
                    index,
                    role: arg.role().to_owned(),
                    given: match arg {
                        ArgSpec::Scalar(value) => format!("a number of {} bytes", value.bytes()),
                        ArgSpec::TensorMap(_) => "a tensor map of 128 bytes at a multiple of 64".to_owned(),
                        _ => "an address of 8 bytes".to_owned(),
                    },
                    parameter: param.name.to_string(),
                    wanted: describe(param),
                });
            }
        }
        Ok(())
    }
}

/// A launch contract under construction.
#[derive(Default)]
struct Contract {
    buffers: Vec<BufferSpec>,
    roles: Vec<Role>,
    maps: Vec<TensorMapSpec>,
    args: Vec<Arg>,
}

impl Contract {
    /// The buffer of an argument, if it has one.
    fn home(&mut self, spec: &LaunchSpec, index: usize) -> Option<usize> {
        let arg = &spec.args[index];
        let tensor = |tensor: Tensor| {
            let access = if tensor == Tensor::Out { Access::Write } else { Access::Read };
            (
                Role::Operand(Operand::Tensor(tensor)),
                tensor.name().to_owned(),
                access,
                spec.tensor_bytes(tensor),
            )
        };
        let memory = |memory: &Memory| {
            let role = Role::Fill { dtype: memory.dtype, init: memory.init };
            (role, format!("arg{index}"), Access::ReadWrite, memory.bytes())
        };
        let (role, name, access, bytes) = match arg {
            ArgSpec::Tensor(of) => tensor(*of),
            ArgSpec::Lse => {
                (Role::Operand(Operand::Lse), "lse".to_owned(), Access::Write, spec.buffer_bytes(arg))
            }
            ArgSpec::Buffer(of) => memory(of),
            ArgSpec::TensorMap(map) => match &map.target {
                MapTarget::Tensor(of) => tensor(*of),
                MapTarget::Own(of) => memory(of),
                MapTarget::Argument(_) => return None,
            },
            ArgSpec::Scalar(_) => return None,
        };
        // A tensor is one buffer, however many arguments refer to it.
        let known = self.roles.iter().position(|r| *r == role && !matches!(role, Role::Fill { .. }));
        Some(known.unwrap_or_else(|| {
            self.roles.push(role);
            // Sizes were checked when the file was read.
            self.buffers.push(BufferSpec { name, bytes: bytes.unwrap_or(0), access });
            self.roles.len() - 1
        }))
    }
}

fn describe(param: &Param) -> String {
    match param.elements {
        Some(n) => format!(".{} {}[{n}]", param.ty, param.name),
        None => format!(".{} {}", param.ty, param.name),
    }
}

/// The size must match, and a float needs a float; `.bN` accepts both.
fn fits(arg: &ArgSpec, param: &Param) -> bool {
    let float = |is_float: bool| param.ty.is_bits() || param.ty.is_float() == is_float;
    match arg {
        ArgSpec::TensorMap(_) => {
            param.bytes() == TensorMapSpec::BYTES && param.align.is_multiple_of(TensorMapSpec::ALIGN)
        }
        ArgSpec::Scalar(value) => param.bytes() == value.bytes() && float(matches!(value, Arg::F32(_))),
        _ => param.bytes() == 8 && float(false),
    }
}
