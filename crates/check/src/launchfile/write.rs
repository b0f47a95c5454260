//! Writes a launch file for a generated kernel, so that its text can be edited and submitted again.

use std::fmt::Write;

use kernels::select::Shape;
use problem::{Operand, Problem, Score};
use ptx::{Arg, L2Promotion, Swizzle, TensorMapSpec};

use super::{Bound, Role};

impl Bound {
    /// The launch file that gives the kernel's text the same launch. `None` if launch files lack a feature of
    /// the launch: several kernels, a counter, quantised codes, overlapping launches, or the backward pass.
    pub fn launch_file(&self) -> Option<String> {
        let (kernel, problem) = (&self.kernel, self.problem.as_ref()?);
        let launch = &kernel.launch;
        if !self.then.is_empty()
            || launch.overlapping
            || problem.pass.is_backward()
            || *problem != Shape::of(problem).problem()
        {
            return None;
        }
        let mut text = problem_table(problem);
        let list = |d: ptx::Dim3| format!("[{}, {}, {}]", d.0, d.1, d.2);
        let (grid, block, cluster) = (list(launch.grid), list(launch.block), list(launch.cluster));
        let (entry, shared) = (&kernel.entry, launch.dynamic_shared);
        let _ = write!(
            text,
            "\n[launch]\nentry = \"{entry}\"\ngrid = {grid}\nblock = {block}\ncluster = {cluster}\ndynamic_shared = {shared}\n"
        );
        for arg in &kernel.args {
            text += "\n[[arg]]\n";
            text += &match arg {
                Arg::Buffer { index, offset: 0 } => format!("role = \"{}\"\n", self.role_name(*index)?),
                Arg::TensorMap { index } => self.map_table(kernel.tensor_maps.get(*index)?)?,
                Arg::U32(value) => format!("role = \"u32\"\nvalue = {value}\n"),
                Arg::I32(value) => format!("role = \"i32\"\nvalue = {value}\n"),
                // TOML's integers are signed 64-bit numbers.
                Arg::U64(value) => format!("role = \"u64\"\nvalue = {}\n", i64::try_from(*value).ok()?),
                Arg::I64(value) => format!("role = \"i64\"\nvalue = {value}\n"),
                Arg::F32(value) if value.is_finite() => format!("role = \"f32\"\nvalue = {value:?}\n"),
                Arg::F64(value) if value.is_finite() => format!("role = \"f64\"\nvalue = {value:?}\n"),
                Arg::U8(value) => format!("role = \"u8\"\nvalue = {value}\n"),
                Arg::U16(value) => format!("role = \"u16\"\nvalue = {value}\n"),
                Arg::Buffer { .. } | Arg::Null | Arg::F32(_) | Arg::F64(_) | Arg::Struct(_) => return None,
            };
        }
        Some(text)
    }

    fn role_name(&self, buffer: usize) -> Option<&'static str> {
        match self.roles.get(buffer)? {
            Role::Operand(operand @ (Operand::Tensor(_) | Operand::Lse)) => Some(operand.name()),
            _ => None,
        }
    }

    fn map_table(&self, map: &TensorMapSpec) -> Option<String> {
        let Some(Role::Operand(Operand::Tensor(tensor))) = self.roles.get(map.buffer) else {
            return None;
        };
        if map.l2_promotion != L2Promotion::default() || map.wraps {
            return None;
        }
        let swizzle = match map.swizzle {
            Swizzle::None => "none",
            Swizzle::Bytes32 => "32",
            Swizzle::Bytes64 => "64",
            Swizzle::Bytes128 => "128",
        };
        let TensorMapSpec { extents, strides, box_extents, offset, .. } = map;
        Some(format!(
            "role = \"tensor_map\"\nof = \"{}\"\ndims = {extents:?}\nstrides = {strides:?}\noffset = {offset}\n\
             box = {box_extents:?}\nswizzle = \"{swizzle}\"\n",
            tensor.name()
        ))
    }
}

fn problem_table(problem: &Problem) -> String {
    let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, dtypes, mask, .. } =
        Shape::of(problem);
    let line = |key: &str, value: Option<f32>| {
        value.map_or_else(String::new, |value| format!("{key} = {value:?}\n"))
    };
    let Score { scale, softcap, .. } = problem.score;
    let (scale, softcap) = (line("scale", scale), line("softcap", softcap));
    format!(
        "[problem]\nbatch = {batch}\nheads_q = {heads_q}\nheads_kv = {heads_kv}\nseq_q = {seq_q}\nseq_kv = {seq_kv}\n\
         head_dim = {head_dim}\nhead_dim_v = {head_dim_v}\ndtype = \"{dtypes}\"\nmask = \"{mask}\"\n{scale}{softcap}"
    )
}

#[cfg(test)]
mod tests {
    use kernels::{Arch, Family};
    use problem::{Band, DType, PassKind};

    use super::*;
    use crate::gate::bind;
    use crate::launchfile::LaunchSpec;

    #[test]
    fn what_is_written_binds_to_the_same_launch() {
        let mut written = 0;
        for (problem, arch) in [
            (Problem::new(1, 2, 128, 64, DType::F16), Arch::SM_90),
            (Problem::new(1, 2, 128, 64, DType::Bf16).with_lse(true), Arch::SM_90),
            (Problem::new(2, 4, 200, 128, DType::Bf16).with_band(Band::CAUSAL), Arch::SM_90),
            (
                Problem::new(1, 2, 200, 128, DType::Bf16)
                    .with_band(Band::CAUSAL_TOP_LEFT)
                    .with_seq_kv(300, problem::Layout::Bhsd),
                Arch::SM_90,
            ),
            (
                Problem { heads_kv: 1, ..Problem::new(1, 2, 96, 64, DType::F16) }
                    .with_layout(problem::Layout::Bhsd),
                Arch::SM_80,
            ),
            (
                Problem { head_dim_v: 128, ..Problem::new(1, 2, 96, 192, DType::Bf16) }
                    .with_layout(problem::Layout::Bhsd),
                Arch::SM_90,
            ),
        ] {
            for family in Family::of_pass(PassKind::Forward) {
                let Ok(plan) = family.default_for(&problem, &arch) else { continue };
                let Ok(bound) = bind(&plan, &problem, &arch) else { continue };
                let Some(text) = bound.launch_file() else { continue };
                let module = ptx::parse(&bound.kernel.module.to_string()).unwrap().verify().unwrap();
                let again = text
                    .parse::<LaunchSpec>()
                    .unwrap_or_else(|e| panic!("{e}\n{text}"))
                    .bind(module)
                    .unwrap();
                assert_eq!(again.kernel.launch, bound.kernel.launch, "{}", family.name());
                assert_eq!(again.kernel.args.len(), bound.kernel.args.len());
                assert_eq!(again.problem, bound.problem);
                for (ours, theirs) in bound.kernel.tensor_maps.iter().zip(&again.kernel.tensor_maps) {
                    let same = |map: &TensorMapSpec| {
                        (map.extents.clone(), map.strides.clone(), map.box_extents.clone())
                    };
                    assert_eq!((same(ours), ours.swizzle), (same(theirs), theirs.swizzle));
                    assert_eq!(bound.roles[ours.buffer], again.roles[theirs.buffer]);
                }
                written += 1;
            }
        }
        assert!(written >= 6, "{written}");
    }
}
