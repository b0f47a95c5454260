//! A launch file meets the module it launches.

use problem::{Problem, Tensor};
use ptx::{Access, Arg, BufferSpec, Function, Kernel, Launch, Module, Param};

use super::{ArgSpec, BufferType, Init, LaunchError, LaunchSpec};

/// What a buffer of a kernel stands for, so that the gate knows what to put in and what to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A tensor of the problem; inputs are drawn, the output is judged.
    Tensor(Tensor),
    /// An input quantised to u8, head by head.
    Codes(Tensor),
    /// The scales of quantised inputs, f32: of each head of Q, then of K, then of V.
    Scales,
    /// The log-sum-exp output, f32, `[batch][head][row]`.
    Lse,
    /// What the kernel keeps for itself from launch to launch: zeros before and after each.
    Counter,
    /// Memory with a given start; what becomes of it is not judged.
    Fill {
        /// Element type.
        dtype: BufferType,
        /// Contents before the launch.
        init: Init,
    },
}

/// A kernel with the meaning of its buffers: what the gate proves.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Module and launch contract.
    pub kernel: Kernel,
    /// One role for each of `kernel.buffers`.
    pub roles: Vec<Role>,
    /// The problem the buffers belong to; `None` when nothing is judged but hazards.
    pub problem: Option<Problem>,
}

impl Bound {
    /// A kernel of ours, whose buffers are named `q`, `k`, `v`, `out` and `lse`, or `q_codes` and so on with `scales` where
    /// inputs are quantised, and `counter` where the kernel hands out its tiles; its module is numbered as it prints, so
    /// that findings name lines.
    ///
    /// # Errors
    /// The name of a buffer that stands for nothing.
    pub fn of_kernel(mut kernel: Kernel, problem: &Problem) -> Result<Bound, LaunchError> {
        kernel.module.number_lines();
        let role = |buffer: &BufferSpec| match buffer.name.as_str() {
            "lse" => Ok(Role::Lse),
            "scales" => Ok(Role::Scales),
            "counter" => Ok(Role::Counter),
            "q_codes" => Ok(Role::Codes(Tensor::Q)),
            "k_codes" => Ok(Role::Codes(Tensor::K)),
            "v_codes" => Ok(Role::Codes(Tensor::V)),
            name => Tensor::ALL.into_iter().find(|t| t.name() == name).map(Role::Tensor).ok_or_else(|| {
                LaunchError::value(
                    "buffer",
                    name,
                    "q, k, v, out, lse, counter, q_codes, k_codes, v_codes, scales",
                )
            }),
        };
        let roles = kernel.buffers.iter().map(role).collect::<Result<_, _>>()?;
        Ok(Bound { kernel, roles, problem: Some(problem.clone()) })
    }
}

impl LaunchSpec {
    /// Joins the launch file with a module.
    ///
    /// # Errors
    /// A [`LaunchError`] when the entry is not there or its parameters do not fit the arguments.
    pub fn bind(&self, module: Module) -> Result<Bound, LaunchError> {
        let entry = self.pick_entry(&module)?;
        self.check_params(entry)?;
        let launch = Launch {
            grid: self.grid,
            cluster: self.cluster,
            block: self.block_for(entry)?,
            dynamic_shared: self.dynamic_shared,
            overlapping: false,
        };
        let (mut buffers, mut roles, mut args) = (Vec::new(), Vec::new(), Vec::new());
        for (index, arg) in self.args.iter().enumerate() {
            if let ArgSpec::Scalar(value) = arg {
                args.push(*value);
                continue;
            }
            args.push(Arg::Buffer { index: buffers.len(), offset: 0 });
            // Sizes were checked when the file was read.
            let bytes = self.buffer_bytes(arg).unwrap_or(0);
            let (role, access) = match *arg {
                ArgSpec::Tensor(Tensor::Out) => (Role::Tensor(Tensor::Out), Access::Write),
                ArgSpec::Tensor(tensor) => (Role::Tensor(tensor), Access::Read),
                ArgSpec::Lse => (Role::Lse, Access::Write),
                ArgSpec::Buffer { dtype, init, .. } => (Role::Fill { dtype, init }, Access::ReadWrite),
                ArgSpec::Scalar(_) => continue,
            };
            roles.push(role);
            let name = match arg {
                ArgSpec::Buffer { .. } => format!("arg{index}"),
                other => other.role().to_owned(),
            };
            buffers.push(BufferSpec { name, bytes, access });
        }
        let entry = entry.name.to_string();
        Ok(Bound {
            kernel: Kernel { tensor_maps: Vec::new(), module, entry, launch, buffers, args },
            roles,
            problem: self.problem.clone(),
        })
    }

    fn pick_entry<'m>(&self, module: &'m Module) -> Result<&'m Function, LaunchError> {
        let accepted = || module.entries().map(|f| f.name.to_string()).collect::<Vec<_>>().join(", ");
        let mut entries = module.entries();
        match (&self.entry, entries.next()) {
            (_, None) => Err(LaunchError::NoEntry),
            (None, Some(only)) => match entries.next() {
                None => Ok(only),
                Some(_) => Err(LaunchError::AmbiguousEntry { accepted: accepted() }),
            },
            (Some(name), _) => module
                .entries()
                .find(|f| *f.name == **name)
                .ok_or_else(|| LaunchError::UnknownEntry { name: name.clone(), accepted: accepted() }),
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
                list: entry.params.iter().map(describe).collect::<Vec<_>>().join(", "),
            });
        }
        for (index, (arg, param)) in self.args.iter().zip(&entry.params).enumerate() {
            if !fits(arg, param) {
                return Err(LaunchError::Mismatch {
                    index,
                    role: arg.role().to_owned(),
                    given: match arg {
                        ArgSpec::Scalar(value) => format!("a number of {} bytes", value.bytes()),
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

fn describe(param: &Param) -> String {
    match param.elements {
        Some(n) => format!(".{} {}[{n}]", param.ty, param.name),
        None => format!(".{} {}", param.ty, param.name),
    }
}

/// Same size, and a float for a float; `.bN` takes both.
fn fits(arg: &ArgSpec, param: &Param) -> bool {
    let float = |is_float: bool| param.ty.is_bits() || param.ty.is_float() == is_float;
    match arg {
        ArgSpec::Scalar(value) => param.bytes() == value.bytes() && float(matches!(value, Arg::F32(_))),
        _ => param.bytes() == 8 && float(false),
    }
}
