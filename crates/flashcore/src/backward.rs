//! The gradients of an attention call.

use cpu::{Element, Input, kept};
use problem::{
    ElementsMut, Gradients as Wants, Layout, Operand, OperandMap, Operands, Pass, Problem, Tensor,
};

use crate::attention::filled;
use crate::gpu::{self, Gpu};
use crate::{Attention, AttentionError, TensorView};

/// The result of [`Attention::backward`]: dense tensors in new memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// The gradient of Q, `[batch, heads_q, seq_q, head_dim]`. For packed queries, all tensors of the queries
    /// are `[1, heads_q, rows, …]`, and for packed keys, those of the keys are `[1, heads_kv, rows, …]`. Rows
    /// that belong to no sequence are 0.
    pub dq: Vec<T>,
    /// The gradient of K, `[batch, heads_kv, seq_kv, head_dim]`.
    pub dk: Vec<T>,
    /// The gradient of V, `[batch, heads_kv, seq_kv, head_dim_v]`.
    pub dv: Vec<T>,
    /// The gradient of the sinks, `[heads_q]`; empty without sinks.
    pub d_sinks: Vec<f32>,
    /// The gradients of the tables of [`Attention::tables`] in their order, then of the slopes, then of the
    /// bias, as the call has them. Each is dense, and a dimension that broadcasts by a stride of 0 has one
    /// element. That of a table of integers is empty.
    pub d_tables: Vec<Vec<f32>>,
}

impl<T: Element> Attention<'_, T> {
    /// The gradients of a loss, from `out` and `lse`, which [`run`](Attention::run) has returned for this
    /// call, and `d_out`, the gradient of the loss by `out`. Sums are in f32 for every element type. Equal
    /// calls on one device return equal bits. For tensors in device memory, prepare a problem with
    /// [`Pass::DETERMINISTIC`] and call
    /// [`enqueue_operands`](crate::gpu::Prepared::enqueue_operands).
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let (x, v) = ([0.0f32; 2 * 8], [1.0f32; 2 * 8]);
    /// let shape = [1, 1, 2, 8];
    /// let x = TensorView::dense(&x, shape, Layout::Bhsd)?;
    /// let v = TensorView::dense(&v, shape, Layout::Bhsd)?;
    /// let call = attention(x, x, v).causal();
    /// let forward = call.clone().run()?;
    /// let out = TensorView::dense(&forward.data, shape, Layout::Bhsd)?;
    /// let gradients = call.backward(out, &forward.lse, v)?;
    /// assert_eq!(gradients.dv[0], 1.5); // key 0 has the weight 1 in row 0 and 1/2 in row 1
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Attention::run); and when `out`, `lse` or `d_out` does not fit the call.
    pub fn backward(
        self,
        out: TensorView<'_, T>,
        lse: &[f32],
        d_out: TensorView<'_, T>,
    ) -> Result<Gradients<T>, AttentionError> {
        let (problem, inputs) = self.backward_problem(out, lse, d_out)?;
        let mut gradients = Gradients::zeros(&problem)?;
        if let Some(ordinal) = self.gpu() {
            let on_gpu =
                Gpu::open(ordinal).and_then(|gpu| gpu::attend(&gpu, &problem, &inputs, gradients.outputs()));
            if !self.goes_on(&on_gpu) {
                return on_gpu.map(|()| gradients);
            }
        }
        let plan = kept::chosen(&problem, cpu::threads()).plan;
        let inputs = inputs.map(|_, &elements| Input::from(elements));
        cpu::gradients(&problem, &inputs, gradients.outputs(), &plan)?;
        Ok(gradients)
    }

    /// The problem of the backward pass and its inputs.
    fn backward_problem<'b>(
        &'b self,
        out: TensorView<'b, T>,
        lse: &'b [f32],
        d_out: TensorView<'b, T>,
    ) -> Result<(Problem, Operands<'b>), AttentionError> {
        for (i, what) in ["batch", "heads", "sequence", "dim"].into_iter().enumerate() {
            let (value, expected) = (d_out.shape[i], out.shape[i]);
            if value != expected {
                return Err(AttentionError::Shape { tensor: "d_out", what, value, other: "out", expected });
            }
        }
        let (problem, inputs) = self.problem(T::DTYPE, out.shape, out.strides, true)?;
        let float = |(i, table): (u8, &problem::Table)| u8::from(table.dtype.is_float()) << i;
        let tables = (0..8).zip(&problem.programs.tables).map(float).sum();
        let wants = Wants { sinks: problem.score.sink, tables };
        let mut problem = problem.with_pass(Pass::Backward { deterministic: true, d_lse: false, wants });
        problem.set_strides(Tensor::DOut, d_out.strides);
        for tensor in Tensor::GRADIENTS {
            let [_, heads, rows, dim] = problem.extents(tensor);
            problem.set_strides(tensor, Layout::Bhsd.strides(heads, rows, dim));
        }
        problem.check()?;
        let inputs = inputs
            .with(Operand::OUT, T::elements(out.data))
            .with(Operand::Lse, lse)
            .with(Operand::Tensor(Tensor::DOut), T::elements(d_out.data));
        problem.check_inputs(&inputs, |elements| (elements.dtype(), elements.len()))?;
        Ok((problem, inputs))
    }

    /// Gradients of 0, if the arguments fit the call.
    pub(crate) fn zero_gradients(
        &self,
        out: TensorView<'_, T>,
        lse: &[f32],
        d_out: TensorView<'_, T>,
    ) -> Result<Gradients<T>, AttentionError> {
        Gradients::zeros(&self.backward_problem(out, lse, d_out)?.0)
    }
}

impl<T: Element> Gradients<T> {
    fn zeros(problem: &Problem) -> Result<Gradients<T>, AttentionError> {
        let zeros = |tensor: Tensor| {
            filled(tensor.name(), problem.extents(tensor).iter().product(), T::from_f32(0.0))
        };
        let floats = |operand: Operand| {
            let elements = problem.operand(operand).map_or(0, |spec| spec.elements);
            filled(operand.name(), elements, 0.0f32)
        };
        let count = problem.programs.tables.len() as u8; // `Problem::check` limits the number of tables
        Ok(Gradients {
            dq: zeros(Tensor::Dq)?,
            dk: zeros(Tensor::Dk)?,
            dv: zeros(Tensor::Dv)?,
            d_sinks: floats(Operand::DSinks)?,
            d_tables: (0..count).map(|table| floats(Operand::DTable(table))).collect::<Result<_, _>>()?,
        })
    }

    fn outputs(&mut self) -> OperandMap<ElementsMut<'_>> {
        let tables = (0..).map(Operand::DTable).zip(self.d_tables.iter_mut());
        let tables = tables.map(|(operand, gradient)| (operand, ElementsMut::F32(gradient)));
        let tensors = [
            (Operand::Tensor(Tensor::Dq), T::elements_mut(&mut self.dq)),
            (Operand::Tensor(Tensor::Dk), T::elements_mut(&mut self.dk)),
            (Operand::Tensor(Tensor::Dv), T::elements_mut(&mut self.dv)),
            (Operand::DSinks, ElementsMut::F32(&mut self.d_sinks)),
        ];
        tensors.into_iter().chain(tables).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, LengthValues, TableView, attention};

    fn ramp(n: usize, step: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * step) % 17) as f32 / 8.0 - 1.0).collect()
    }

    /// Every option of the call reaches the gradients: central differences of the loss Σ dO·O.
    #[test]
    fn gradients_are_differences_of_the_call() {
        let (q, k, v) = (ramp(4 * 5 * 8, 3), ramp(2 * 7 * 8, 5), ramp(2 * 7 * 8, 11));
        let d_out = ramp(4 * 5 * 8, 7);
        let (sinks, slopes, bias) = ([0.5, -0.25, 0.0, 1.0], [0.5, 0.25, 0.125, 1.0], ramp(5 * 7, 13));
        let ends_q = [0, 3, 5];
        let ends_kv = [0, 2, 7];
        let with = |given: [&[f32]; 6], run: &mut dyn FnMut(Attention<'_, f32>)| {
            let [q, k, v, sinks, slopes, bias] = given;
            let view = |data, shape| TensorView::dense(data, shape, Layout::Bshd).unwrap();
            let call = attention(view(q, [1, 4, 5, 8]), view(k, [1, 2, 7, 8]), view(v, [1, 2, 7, 8]));
            let lengths =
                LengthValues { cumulative_q: &ends_q, cumulative_kv: &ends_kv, ..LengthValues::default() };
            let call = call.lengths(lengths).causal().softcap(2.0).sink(sinks).alibi(slopes);
            let bias = TableView::dense(bias, &[1, 1, 3, 5]).unwrap();
            run(call.bias(bias).dropout(0.25, 3 << 40).device(Device::Cpu));
        };
        let bias = &bias[..15];
        let given: [&[f32]; 6] = [&q, &k, &v, &sinks, &slopes, bias];
        let loss = |given: [&[f32]; 6]| {
            let mut loss = 0.0;
            with(given, &mut |call| {
                let out = call.run().unwrap().data;
                loss = out.iter().zip(&d_out).map(|(&o, &d)| f64::from(o) * f64::from(d)).sum();
            });
            loss
        };
        let mut found = None;
        with(given, &mut |call| {
            let forward = call.clone().run().unwrap();
            let view = |data| TensorView::dense(data, [1, 4, 5, 8], Layout::Bhsd).unwrap();
            found = Some(call.backward(view(&forward.data), &forward.lse, view(&d_out)).unwrap());
        });
        let found = found.unwrap();
        assert_eq!((found.d_tables[0].len(), found.d_tables[1].len()), (4, 15));
        // Gradients are [head, row, dim], inputs [row, head, dim].
        let place = |heads: usize, i: usize| {
            let (row, head, d) = (i / 8 / heads, i / 8 % heads, i % 8);
            move |rows: usize| (head * rows + row) * 8 + d
        };
        for (input, gradient, at) in [
            (0, &found.dq, place(4, 57)(5)),
            (1, &found.dk, place(2, 57)(7)),
            (2, &found.dv, place(2, 57)(7)),
            (3, &found.d_sinks, 1),
            (4, &found.d_tables[0], 2),
            (5, &found.d_tables[1], 6),
        ] {
            let element = match input {
                0..=2 => 57,
                _ => at,
            };
            let shifted = |step: f32| {
                let mut changed = given[input].to_vec();
                changed[element] += step;
                let mut given = given;
                given[input] = &changed;
                loss(given)
            };
            let step = 1.0 / 64.0;
            let difference = (shifted(step) - shifted(-step)) / (2.0 * f64::from(step));
            let value = f64::from(gradient[at]);
            assert!((value - difference).abs() < 2e-3, "input {input}: {value}, not {difference}");
            assert!(value.abs() > 1e-4, "input {input} has no gradient");
        }
    }

    #[test]
    fn wrong_gradients_are_refused_by_name() {
        let x = [0.0f32; 32];
        let view = |rows| TensorView::dense(&x, [1, 1, rows, 8], Layout::Bhsd).unwrap();
        let call = attention(view(2), view(2), view(2));
        let refused = |error: AttentionError| error.to_string();
        let share = call.clone().dropout(1.5, 0).backward(view(2), &[0.0; 2], view(2)).unwrap_err();
        assert!(refused(share).contains("'1.5' for dropout_p: expected a number from 0 to 1"));
        let shape = call.clone().backward(view(2), &[0.0; 2], view(3)).unwrap_err();
        assert_eq!(refused(shape), "d_out has sequence = 3, but out has 2; they must be equal");
        let lse = call.clone().backward(view(2), &[0.0; 3], view(2)).unwrap_err();
        assert!(refused(lse).contains("'3' for the number of elements of lse: expected 2"));
    }
}
