//! NaN and infinity in a key or a value that rows do not see, in every family. `docs/src/guide/bias.md` has
//! the table: a mask hides keys of any contents, but not values; a bias of −∞ is added.

use emu::{Emulator, Options};
use flashcore_kernels::{Arch, BufferKind, Family, Plan, emit};
use half::f16;
use problem::program::library as lib;
use problem::{Band, DType, Operand, PassKind, Problem, Program, Programs, Tensor};
use ptx::Machine;

const DIM: usize = 64;
/// The key that a mask program and a bias hide from all rows.
const HIDDEN: usize = 40;
/// The column with the number.
const COLUMN: usize = 3;

/// The outputs of a run, in which a row of K or of V may have a number in one column.
fn outputs(problem: &Problem, plan: &Plan, number: Option<(Tensor, f16)>) -> Vec<f16> {
    let program = emit(problem, plan, &Arch::SM_90).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let mut machine = Emulator::new(Options { collectives_order: true, ..Options::default() });
    let mut buffers = Vec::new();
    for spec in &program.contracts.buffers {
        let mut buffer = machine.allocate(spec.bytes).unwrap();
        if let BufferKind::Operand(Operand::Tensor(tensor @ (Tensor::Q | Tensor::K | Tensor::V))) = spec.kind
        {
            let element = |i: usize| match number {
                Some((of, number)) if of == tensor && i == HIDDEN * DIM + COLUMN => number,
                _ => f16::from_f32((((i * 37 + 11 * tensor as usize) * 29) % 64) as f32 / 32.0 - 1.0),
            };
            let bytes: Vec<u8> = (0..spec.bytes / 2).flat_map(|i| element(i).to_le_bytes()).collect();
            machine.upload(&mut buffer, &bytes).unwrap();
        } else if spec.kind == BufferKind::Counter {
            machine.upload(&mut buffer, &vec![0; spec.bytes]).unwrap();
        }
        buffers.push(buffer);
    }
    for kernel in program.kernels() {
        machine.launch(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>()).unwrap();
    }
    let out = program.contracts.buffers.iter().position(|spec| spec.kind == Operand::OUT.into()).unwrap();
    let mut bytes = vec![0; program.contracts.buffers[out].bytes];
    machine.download(&buffers[out], &mut bytes).unwrap();
    bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()
}

/// The name of the mask that hides the key, the problem, and whether the key is hidden from a row.
type Hiding = (&'static str, Problem, fn(usize) -> bool);

fn hiding() -> Vec<Hiding> {
    let plain = Problem::new(1, 1, 100, DIM, DType::F16);
    let with = |programs| Problem { programs, ..plain.clone() };
    let key = || lib::key().eq(HIDDEN as i32);
    let bias = lib::score() + key().select(f32::NEG_INFINITY, 0.0f32);
    let program = |expr| Some(Program::new(&expr).unwrap());
    vec![
        ("causal", plain.clone().with_band(Band::CAUSAL), |row| row < HIDDEN),
        ("window", plain.clone().with_band(Band::window(5, 9)), |row| {
            !(HIDDEN - 9..=HIDDEN + 5).contains(&row)
        }),
        ("mask", with(Programs { mask: program(!key()), ..Programs::default() }), |_| true),
        ("bias", with(Programs { score: program(bias), ..Programs::default() }), |_| true),
    ]
}

#[test]
fn hidden_keys_of_any_contents_change_nothing_but_by_a_bias() {
    for family in Family::of_pass(PassKind::Forward) {
        for (hides, problem, hidden) in hiding() {
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let clean = outputs(&problem, &plan, None);
            for number in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
                let found = outputs(&problem, &plan, Some((Tensor::K, number)));
                for row in (0..problem.seq_q).filter(|&row| hidden(row)) {
                    let [clean, found] = [&clean, &found].map(|out| &out[row * DIM..(row + 1) * DIM]);
                    let at = format!("{family:?} {hides} {number} row {row}");
                    // −∞ + NaN and −∞ + ∞ are NaN; −∞ − ∞ hides the key.
                    let becomes_nan = hides == "bias" && found.iter().all(|x| x.is_nan());
                    assert!(clean == found || becomes_nan, "{at}");
                    assert!(hides != "bias" || !number.is_nan() || becomes_nan, "{at}");
                }
            }
        }
    }
}

/// A probability of 0 times NaN or infinity is NaN, in the column of the value alone.
#[test]
fn hidden_values_reach_their_column_alone() {
    for family in Family::of_pass(PassKind::Forward) {
        for (hides, problem, hidden) in hiding() {
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let clean = outputs(&problem, &plan, None);
            for number in [f16::NAN, f16::INFINITY] {
                let found = outputs(&problem, &plan, Some((Tensor::V, number)));
                for (i, (clean, found)) in clean.iter().zip(&found).enumerate() {
                    let (row, column) = (i / DIM, i % DIM);
                    if !hidden(row) {
                        continue;
                    }
                    let at = format!("{family:?} {hides} {number} row {row} column {column}");
                    let becomes_nan = column == COLUMN && found.is_nan();
                    assert!(clean == found || becomes_nan, "{at}: {clean} {found}");
                    assert!(hides != "bias" || column != COLUMN || becomes_nan, "{at}");
                }
            }
        }
    }
}
