//! The `wgmma` family on 8-bit inputs, in the emulator: no hazards with every check on, and results within
//! the rounding of P and O.

use crate::common::wgmma_plan::plain;
use crate::tools;
use attend::{Order, OutputSums, Packing, Tiles};
use emu::{Emulator, Options};
use flashcore_kernels::forward::mma::MmaPlan;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Share, Store, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Operand, Plan, Program, emit};
use half::{bf16, f16};
use problem::{Band, DType, DTypes, E4m3, E5m2, Layout, Problem, ScaleLayout, Tensor};
use ptx::Machine;
use tile::{Handout, TileOrder, Turns};

/// A device with two SMs, so that a CTA computes several tiles.
const SMALL: Arch = Arch { multiprocessors: 2, ..Arch::SM_90 };

/// The simplest plan for 8-bit values.
fn base() -> WgmmaPlan {
    WgmmaPlan { block_n: 64, rescale: Rescaling::Beyond(0), output_sums: OutputSums::ByBlock, ..plain() }
}

fn decode(dtype: DType, bits: u16) -> f64 {
    match dtype {
        DType::E4m3 => E4m3::from_bits(bits as u8).to_f32().into(),
        DType::E5m2 => E5m2::from_bits(bits as u8).to_f32().into(),
        DType::Bf16 => bf16::from_bits(bits).to_f64(),
        _ => f16::from_bits(bits).to_f64(),
    }
}

fn encode(dtype: DType, value: f64) -> u16 {
    match dtype {
        DType::E4m3 => E4m3::from_f32(value as f32).to_bits().into(),
        DType::E5m2 => E5m2::from_f32(value as f32).to_bits().into(),
        DType::Bf16 => bf16::from_f64(value).to_bits(),
        _ => f16::from_f64(value).to_bits(),
    }
}

/// Draws from a roughly normal distribution of variance 1 (xorshift64*, sum of four uniforms).
fn draw(state: &mut u64) -> f64 {
    let mut sum = 0.0;
    for _ in 0..4 {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        sum += (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64;
    }
    (sum - 2.0) * 3.0f64.sqrt()
}

/// Inputs of a run and its output.
struct Run {
    problem: Problem,
    /// Codes of Q, K and V, and of O.
    tensors: [Vec<u16>; 4],
    /// Factors of Q, K and V.
    scales: [Vec<f32>; 3],
    lse: Vec<f32>,
}

/// Runs a program on fresh inputs. `edit` changes the program first.
fn run(problem: &Problem, plan: WgmmaPlan, seed: u64, edit: impl FnOnce(&mut Program)) -> Run {
    let plan = Plan::Wgmma(plan);
    let mut program = emit(problem, &plan, &SMALL).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    edit(&mut program);
    let inputs = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
        let (elements, origin) = problem.span(tensor).expect("the problem was checked");
        let dtype = problem.dtypes.of(tensor);
        // Codes of NaN between the rows.
        let mut data = vec![if dtype.is_fp8() { 0x7F } else { 0x7FFF }; elements];
        let mut state = (seed + 7 * tensor as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let [batch, heads, rows, dim] = problem.extents(tensor);
        for (b, h, s) in
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |s| (b, h, s))))
        {
            let start = (origin as i64 + problem.strides(tensor).offset(b, h, s)) as usize;
            data[start..start + dim].iter_mut().for_each(|code| *code = encode(dtype, draw(&mut state)));
        }
        data
    });
    let scales = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
        let factor = |i: usize| 0.4 + 0.3 * i as f32 + 0.1 * tensor as usize as f32;
        (0..problem.scale_len(tensor)).map(factor).collect::<Vec<f32>>()
    });
    let bytes = |data: &[u16], dtype: DType| -> Vec<u8> {
        data.iter().flat_map(|code| code.to_le_bytes()[..dtype.bytes()].to_vec()).collect()
    };
    let mut machine = Emulator::new(Options { seed, ..Options::default() });
    let mut buffers: Vec<_> = Vec::new();
    for (operand, spec) in program.operands.iter().zip(&program.kernel.buffers) {
        let content = match *operand {
            Operand::Tensor(Tensor::Out) | Operand::Lse => Some(vec![0xFF; spec.bytes]),
            Operand::Tensor(tensor) => Some(bytes(&inputs[tensor as usize], problem.dtypes.of(tensor))),
            Operand::Descale(tensor) => {
                Some(scales[tensor as usize].iter().flat_map(|factor| factor.to_le_bytes()).collect())
            }
            Operand::Sinks => {
                Some((0..problem.heads_q).flat_map(|h| (h as f32 - 1.0).to_le_bytes()).collect())
            }
            Operand::Counter => Some(vec![0; spec.bytes]),
            // Temporaries may hold anything.
            _ => None,
        };
        let mut buffer = machine.allocate(spec.bytes).expect("memory");
        if let Some(content) = content {
            machine.upload(&mut buffer, &content).expect("upload");
        }
        buffers.push(buffer);
    }
    for kernel in program.steps() {
        let mut buffers: Vec<_> = buffers.iter_mut().collect();
        machine.launch(kernel, &mut buffers).unwrap_or_else(|e| panic!("{plan:?} {problem:?}: {e}"));
    }
    let mut read = |operand: Operand| {
        let at = program.operands.iter().position(|&o| o == operand)?;
        let mut data = vec![0; program.kernel.buffers[at].bytes];
        machine.download(&buffers[at], &mut data).expect("download");
        Some(data)
    };
    let out = read(Operand::Tensor(Tensor::Out)).expect("an output");
    let lse = read(Operand::Lse).unwrap_or_default();
    let [q, k, v] = inputs;
    let out = out.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let lse = lse.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Run { problem: problem.clone(), tensors: [q, k, v, out], scales, lse }
}

/// The error of an output, relative to what the rounding of P and O explains.
#[derive(Debug)]
struct Error {
    /// Root mean square of the error over that of the output.
    relative: f64,
    /// Largest error over its bound.
    worst: f64,
}

impl Run {
    fn row(&self, tensor: Tensor, [b, h, s]: [usize; 3]) -> Vec<f64> {
        let (_, origin) = self.problem.span(tensor).expect("the problem was checked");
        let start = (origin as i64 + self.problem.strides(tensor).offset(b, h, s)) as usize;
        let codes = &self.tensors[tensor as usize][start..start + self.problem.extents(tensor)[3]];
        codes.iter().map(|&code| decode(self.problem.dtypes.of(tensor), code)).collect()
    }

    fn descale(&self, tensor: Tensor, batch: usize, head: usize) -> f64 {
        let factors = &self.scales[tensor as usize];
        self.problem.scales.of(tensor).map_or(1.0, |layout| factors[layout.index(batch, head, 0)].into())
    }

    /// Compares with f64 arithmetic. The bound is the rounding of P to its type (a relative error of at most
    /// `u`, and half of the smallest number where a row's largest probability is 2^8), the rounding of O, and
    /// the truncated sums of 8-bit products: 2^-12 of the largest partial sum, for each of the steps.
    fn error(&self) -> Error {
        let p = &self.problem;
        let [of_p, of_out] = [p.dtypes.weights(), p.dtypes.out].map(DType::unit_roundoff);
        let (mut squares, mut of_errors, mut worst) = (0.0, 0.0, 0.0f64);
        let mut lse = self.lse.iter();
        for (b, h, s) in
            (0..p.batch).flat_map(|b| (0..p.heads_q).flat_map(move |h| (0..p.seq_q).map(move |s| (b, h, s))))
        {
            let kv_head = h / p.group_size();
            let q = self.row(Tensor::Q, [b, h, s]);
            let visible = p.band.keys(s, p.seq_q, p.seq_kv);
            let scale = f64::from(p.softmax_scale())
                * self.descale(Tensor::Q, b, kv_head)
                * self.descale(Tensor::K, b, kv_head);
            let logit = |j: usize| {
                let key = self.row(Tensor::K, [b, kv_head, j]);
                p.score.logit(scale, q.iter().zip(&key).map(|(a, b)| a * b).sum())
            };
            let keys = visible.start..visible.end;
            let logits: Vec<f64> = keys.clone().map(logit).collect();
            let sink = p.score.sink.then_some(h as f64 - 1.0);
            let max = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let of_keys: f64 = logits.iter().map(|l| (l - max).exp()).sum();
            let sum = of_keys + sink.map_or(0.0, |sink| (sink - max).exp());
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut want = vec![[0.0; 3]; p.head_dim_v];
            let factor = self.descale(Tensor::V, b, kv_head);
            for (j, logit) in keys.zip(&logits) {
                let weight = (logit - max).exp() / sum;
                let tiny = 2f64.powi(-17) * (largest - max).exp() / sum;
                for (w, v) in want.iter_mut().zip(self.row(Tensor::V, [b, kv_head, j])) {
                    let v = factor * v;
                    *w = [w[0] + weight * v, w[1] + weight * v.abs(), w[2] + tiny * v.abs()];
                }
            }
            for (got, [value, magnitude, tiny]) in self.row(Tensor::Out, [b, h, s]).into_iter().zip(want) {
                let truncated = if p.dtypes.v.is_fp8() { 2f64.powi(-10) } else { 1e-5 };
                let scores = if p.dtypes.q.is_fp8() { 2f64.powi(-8) } else { 0.0 };
                let bound = of_p * magnitude
                    + of_out * value.abs() * 1.01
                    + tiny
                    + (truncated + scores) * magnitude
                    + 1e-7;
                let error = got - value;
                worst = worst.max(if error.is_nan() { f64::INFINITY } else { error.abs() / bound });
                squares += value * value;
                of_errors += error * error;
            }
            if p.pass.lse() {
                let got = f64::from(*lse.next().expect("an LSE of each row"));
                let want = if visible.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
                let close = got == want || (got - want).abs() <= 4e-3 * (1.0 + want.abs());
                worst = if close { worst } else { f64::INFINITY };
            }
        }
        let relative = (of_errors / squares).sqrt();
        Error { relative: if relative.is_nan() { f64::INFINITY } else { relative }, worst }
    }

    fn check(&self) {
        let error = self.error();
        let relative = 0.6 * self.problem.dtypes.weights().unit_roundoff()
            + self.problem.dtypes.out.unit_roundoff()
            + 4e-3;
        assert!(
            error.worst <= 1.0 && error.relative <= relative,
            "{:?}: {error:?}, accepted: {relative}",
            self.problem
        );
    }
}

fn check(problem: &Problem, plan: WgmmaPlan, seed: u64) {
    run(problem, plan, seed, |_| {}).check();
}

fn problem(seq_q: usize, seq_kv: usize, dim: usize, types: &str, band: Band) -> Problem {
    let dtypes: DTypes = types.parse().expect("types");
    let problem = Problem::new(1, 2, seq_q, dim, DType::E4m3).with_dtypes(dtypes).with_band(band);
    problem.with_seq_kv(seq_kv, Layout::Bshd).with_lse(true)
}

const WINDOW: Band = Band { before: Some(50), ..Band::CAUSAL };

/// Both types, ragged ends, each mask, each class of row width.
#[test]
fn shapes_and_types() {
    for (i, (seq_q, seq_kv, dim, types, band)) in [
        (64, 64, 64, "e4m3", Band::FULL),
        (70, 133, 64, "e4m3", Band::FULL),
        (100, 100, 64, "e5m2:f16", Band::CAUSAL),
        (17, 150, 128, "e4m3/e5m2/e4m3", Band::CAUSAL),
        (130, 200, 128, "e5m2/e4m3/e5m2", WINDOW),
        (90, 37, 16, "e4m3", Band::CAUSAL),
        (40, 150, 48, "e5m2", Band::FULL),
        (66, 130, 80, "e4m3:f16", Band::CAUSAL_TOP_LEFT),
        (50, 97, 96, "e4m3", Band::FULL),
        (65, 129, 192, "e4m3", Band::CAUSAL),
        (80, 160, 256, "e4m3", Band::FULL),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = problem(seq_q, seq_kv, dim, types, band);
        let output_sums = if dim > 128 { OutputSums::Running } else { OutputSums::ByBlock };
        check(&problem, WgmmaPlan { output_sums, ..base() }, i as u64);
    }
}

/// Q and K in 8 bits, P and V in 16.
#[test]
fn mixed_types() {
    for (types, band) in [("e4m3/e4m3/bf16", Band::CAUSAL), ("e5m2/e4m3/f16", Band::FULL)] {
        for output_sums in [OutputSums::Running, OutputSums::ByBlock] {
            let plan = WgmmaPlan { block_n: 48, output_sums, ..plain() };
            check(&problem(70, 133, 64, types, band), plan, 3);
        }
    }
}

/// Values of genes that the product of 8-bit P and V meets.
#[test]
fn genes() {
    let two = WgmmaPlan { consumers: 2, ..base() };
    let plans = [
        WgmmaPlan { block_n: 96, stages: 1, ..base() },
        WgmmaPlan { block_n: 160, exps_by_fma: 3, ..base() },
        WgmmaPlan { output_sums: OutputSums::Running, rescale: Rescaling::Always, ..base() },
        WgmmaPlan { output_sums: OutputSums::Running, rescale: Rescaling::Beyond(2), ..base() },
        WgmmaPlan { rescale: Rescaling::Always, products: Order::InTurn, ..base() },
        WgmmaPlan { rescale: Rescaling::Speculative { beyond: 5, limit: 8 }, exps_by_fma: 2, ..two.clone() },
        WgmmaPlan { turns: Turns::PingPong, tiles: Tiles::Overlapped, ..two.clone() },
        WgmmaPlan { handout: Handout::Dynamic, tile_order: TileOrder::LongestFirst, ..two.clone() },
        WgmmaPlan { ends: Ends::Own, diagonal: Diagonal::Halved, block_n: 128, ..two.clone() },
        WgmmaPlan { store: Store::Bulk, cluster: 2, ..two.clone() },
        WgmmaPlan { consumers: 3, block_n: 96, ..base() },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        let band = if i % 2 == 0 { Band::CAUSAL } else { Band::FULL };
        check(&problem(200, 200, 64, "e4m3", band), plan, i as u64);
    }
}

/// Groups of heads, packed or not, with a softcap, sinks and descale factors.
#[test]
fn features() {
    for (i, packing) in [Packing::Apart, Packing::Packed].into_iter().enumerate() {
        let mut p = Problem::new(2, 4, 50, 64, DType::E4m3).with_band(WINDOW).with_heads_kv(2, Layout::Bshd);
        p.score.softcap = (i == 1).then_some(2.0);
        p.score.sink = i == 0;
        p.scales.q = Some(ScaleLayout::TENSOR);
        p.scales.k = Some(ScaleLayout::per_head(2));
        p.scales.v = Some(ScaleLayout { batch: 0, ..ScaleLayout::per_head(2) });
        check(&p, WgmmaPlan { packing, ..base() }, 5);
    }
}

/// The text of the last kernel, the attention kernel, changed.
fn edit_text(program: &mut Program, change: impl Fn(&str) -> String) {
    let text = program.kernel.module.to_string();
    let mutant = change(&text);
    assert!(mutant != text, "the change finds nothing to change");
    let module = ptx::parse(&mutant).expect("PTX").verify().expect("well-formed PTX");
    program.kernel.module = module.clone();
    program.then.iter_mut().for_each(|kernel| kernel.module = module.clone());
}

/// The lines of a text, each kept, replaced or dropped.
fn lines(text: &str, change: impl Fn(&str, Option<&str>) -> Option<String>) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let changed = (0..lines.len()).filter_map(|i| change(lines[i], lines.get(i + 1).copied()));
    changed.map(|line| line + "\n").collect()
}

/// Warpgroups that divide the head dim multiply 16-bit inputs only, and `mma` has no products of 8 bits.
#[test]
fn combinations_without_a_kernel_are_refused() {
    let wide = Problem { head_dim_v: 512, ..Problem::new(1, 1, 64, 64, DType::E4m3) };
    let refused = |plan: Plan| plan.check(&wide, &Arch::SM_90).expect_err("refused").to_string();
    let divided = WgmmaPlan { share: Share::HeadDim, consumers: 2, ..base() };
    let refused_share = refused(Plan::Wgmma(divided));
    assert!(
        refused_share.starts_with("invalid value 'e4m3' for types")
            && refused_share.contains("16-bit inputs with share = head_dim"),
        "{refused_share}"
    );
    let refused_dim = refused(Plan::Wgmma(base()));
    assert!(refused_dim.contains("head_dim_v: expected 1 to 256 with share = rows"), "{refused_dim}");
    let refused_type = refused(Plan::Mma(MmaPlan::default_for(&wide, &Arch::SM_90)));
    assert!(refused_type.contains("family mma does not compute 8-bit inputs"), "{refused_type}");
    let genes = Family::Wgmma.genes(&wide);
    let share = genes.iter().find(|gene| gene.name == "share").expect("a gene");
    assert!(share.searched.is_empty(), "{share:?}");
}

/// Kernels with one fault each are told from the right one.
#[test]
fn faults_are_seen() {
    // Three panels of keys; the light keys of the first panels weigh as much as the others.
    let problem = problem(64, 300, 64, "e4m3", Band::FULL);
    let plan = WgmmaPlan { block_n: 128, rescale: Rescaling::Always, ..base() };
    let run = |edit: &dyn Fn(&mut Program)| run(&problem, plan.clone(), 9, edit).error();
    let right = run(&|_| {});
    assert!(right.worst <= 1.0 && right.relative < 0.05, "{right:?}");
    let scaled_twice = run(&|program: &mut Program| {
        let factor = program.then[0].args.iter_mut().find_map(|arg| match arg {
            ptx::Arg::F32(factor) => Some(factor),
            _ => None,
        });
        *factor.expect("the factor of the scores") *= 0.125;
    });
    let factor_forgotten = run(&|program: &mut Program| {
        edit_text(program, |text| {
            lines(text, |line, _| match line.trim().strip_prefix("rcp.approx.ftz.f32 ") {
                None => Some(line.to_owned()),
                Some(operands) => {
                    let sum = operands.split(", ").nth(1)?.trim_end_matches(';');
                    Some(format!("mul.f32 {sum}, {sum}, 0f3B800000;\n{line}"))
                }
            })
        });
    });
    // The second panel instead of the first, and so on; the last panel is zero.
    let off_by_a_panel = run(&|program: &mut Program| {
        let map = program.then[0].tensor_maps.iter_mut().find(|map| map.offset == 0 && map.extents[0] == 304);
        let map = map.expect("the map of the transposed values");
        map.offset += 128;
        map.extents[0] -= 128;
    });
    // O keeps the last block alone.
    let never_added = run(&|program: &mut Program| {
        edit_text(program, |text| {
            lines(text, |line, next| {
                let added = line.trim().strip_prefix("fma.rn.f32 ").is_some_and(|operands| {
                    let of: Vec<&str> = operands.split(", ").collect();
                    of[0] == of[1]
                });
                let exponent = next.is_some_and(|next| next.trim().starts_with("ex2"));
                (!added || exponent).then(|| line.to_owned())
            })
        });
    });
    for (fault, error) in [
        ("scale twice", scaled_twice),
        ("P's factor forgotten in the sum", factor_forgotten),
        ("V off by a panel", off_by_a_panel),
        ("blocks not added", never_added),
    ] {
        assert!(error.worst > 1.0 && error.relative > 0.1, "{fault}: {error:?}");
    }
}

/// The default plans of long problems in ptxas: nothing spills, and products are waited for where the code
/// says so, not one by one, as when ptxas serialises them.
#[test]
fn default_plans_are_not_serialised() {
    let Some(ptxas) = tools::find("FLASHCORE_PTXAS") else { return };
    let nvdisasm = tools::find("FLASHCORE_NVDISASM");
    for (dim, types) in
        [(64, "e4m3"), (128, "e4m3"), (128, "e5m2:f16"), (256, "e4m3"), (128, "e4m3/e4m3/bf16")]
    {
        for band in [Band::FULL, Band::CAUSAL, Band::window(1023, 0)] {
            let dtypes: DTypes = types.parse().expect("types");
            let problem = Problem::new(2, 16, 8192, dim, DType::E4m3).with_dtypes(dtypes).with_band(band);
            let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
            let program = emit(&problem, &Plan::Wgmma(plan.clone()), &Arch::SM_90).expect("a default plan");
            let assembled = tools::assemble(&ptxas, &program.kernel);
            println!("{dim} {types} {band}: {} registers, {} spilled", assembled.registers, assembled.spills);
            assert_eq!(assembled.spills, 0, "{plan:?}");
            let Some(nvdisasm) = &nvdisasm else { continue };
            let machine = tools::disassemble(nvdisasm, &assembled);
            let text = program.kernel.module.to_string();
            let products = machine.matches("QGMMA").count() + machine.matches("HGMMA").count();
            assert_eq!(products, text.matches("wgmma.mma_async").count(), "{plan:?}");
            let waits = machine.matches("WARPGROUP.DEPBAR").count();
            assert_eq!(waits, text.matches("wgmma.wait_group").count(), "{plan:?}");
        }
    }
}
