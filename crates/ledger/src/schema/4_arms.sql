-- Whoever counts candidates leaves out what they are compared with, in each stage and of each operator; each reason has an example. What a
-- run's page shows of its best is read of few pages of the file, as on a disk that is all that counts: the sound ones of an arm are found
-- without a look at the others, and an ancestor's short timing without one at its samples. So is what won a race.

CREATE TABLE passage (
  run INTEGER NOT NULL,
  arm TEXT NOT NULL,
  stage TEXT NOT NULL,
  entered INTEGER NOT NULL,
  PRIMARY KEY (run, arm, stage)
) STRICT, WITHOUT ROWID;
INSERT INTO passage
  SELECT o.run, s.arm, o.stage, count(*) FROM outcome o JOIN standing s ON s.candidate = o.candidate GROUP BY o.run, s.arm, o.stage;
CREATE TRIGGER outcome_passes AFTER INSERT ON outcome BEGIN
  INSERT INTO passage SELECT new.run, arm, new.stage, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET entered = entered + 1;
END;

ALTER TABLE death ADD COLUMN latest INTEGER;
UPDATE death SET latest = l.rejection
  FROM (SELECT s.run, s.arm, r.stage, r.reason, max(r.id) AS rejection FROM rejection r JOIN standing s ON s.candidate = r.candidate
    GROUP BY s.run, s.arm, r.stage, r.reason) l
  WHERE (l.run, l.arm, l.stage, l.reason) = (death.run, death.arm, death.stage, death.reason);

UPDATE operator_tally SET
    candidates = operator_tally.candidates - c.candidates, timed = operator_tally.timed - c.timed, faster = operator_tally.faster - c.faster,
    promoted = operator_tally.promoted - c.promoted, rejected = operator_tally.rejected - c.rejected
  FROM (SELECT run, operator, count(*) AS candidates, count(us) AS timed,
      sum((SELECT count(*) FROM measurement m WHERE m.candidate = s.candidate AND m.trial <> 'held_out' AND m.verdict = 'FASTER')) AS faster,
      sum(promoted) AS promoted, sum((SELECT count(*) FROM rejection r WHERE r.candidate = s.candidate)) AS rejected
    FROM standing s WHERE arm NOT IN ('evolution', 'random') GROUP BY run, operator) c
  WHERE (c.run, c.operator) = (operator_tally.run, operator_tally.operator);
DELETE FROM operator_tally WHERE candidates = 0;

ALTER TABLE standing ADD COLUMN won INTEGER NOT NULL DEFAULT 0;
UPDATE standing SET won = 1 WHERE candidate IN (SELECT candidate FROM measurement WHERE verdict = 'FASTER' AND trial = 'race');
DROP TRIGGER candidate_counts;
CREATE TRIGGER candidate_counts AFTER INSERT ON candidate BEGIN
  INSERT INTO standing (candidate, run, problem, device, subject, arm, operator)
    VALUES (new.id, new.run, new.problem, (SELECT device FROM run WHERE id = new.run), new.subject, new.arm, new.operator);
  INSERT INTO tally (run, problem, arm, candidates) VALUES (new.run, new.problem, new.arm, 1)
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  INSERT INTO operator_tally (run, operator, candidates) SELECT new.run, new.operator, 1 WHERE new.arm IN ('evolution', 'random')
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
END;
DROP TRIGGER measurement_counts;
CREATE TRIGGER measurement_counts AFTER INSERT ON measurement WHEN new.trial <> 'held_out' BEGIN
  UPDATE tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    raced = raced + (new.trial = 'race')
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    faster = faster + (new.verdict IS 'FASTER'),
    gain = gain * iif(new.trial = 'race', 1.0, max(1.0, coalesce((SELECT p.us / new.us FROM progress p, standing s WHERE s.candidate = new.candidate
        AND (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 1.0)))
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  INSERT INTO progress
    SELECT s.run, s.problem, new.trial, s.arm, iif(new.trial = 'race', t.raced, t.timed), t.candidates, new.at, new.candidate, new.us, new.low_us,
        new.high_us
      FROM standing s JOIN tally t ON (t.run, t.problem, t.arm) = (s.run, s.problem, s.arm)
      WHERE s.candidate = new.candidate AND new.us < coalesce((SELECT p.us FROM progress p
        WHERE (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 9e999)
    ON CONFLICT DO UPDATE SET
      candidate = excluded.candidate, at = excluded.at, us = excluded.us, low_us = excluded.low_us, high_us = excluded.high_us;
  INSERT INTO niche
    SELECT run, problem, bound, tile, 1, candidate, new.us FROM standing
      WHERE candidate = new.candidate AND arm IN ('baseline', 'evolution') AND bound IS NOT NULL AND tile IS NOT NULL
    ON CONFLICT DO UPDATE SET
      timed = timed + 1, candidate = iif(new.us < us, new.candidate, candidate), us = min(us, new.us);
  INSERT INTO pair
    SELECT author, device, id, (SELECT run FROM candidate WHERE id = new.candidate), new.candidate, new.trial, low_us, us,
        high_us, new.us
      FROM forecast
      WHERE candidate = new.candidate AND new.kind = 'measured'
    ON CONFLICT DO UPDATE SET trial = new.trial, measured_us = new.us WHERE trial <> 'race' OR new.trial = 'race';
  UPDATE standing SET won = 1 WHERE candidate = new.candidate AND new.trial = 'race' AND new.verdict = 'FASTER';
  UPDATE standing SET
    trial = new.trial, kind = new.kind, us = new.us, low_us = new.low_us, high_us = new.high_us
    WHERE candidate = new.candidate AND (trial IS NOT 'race' OR new.trial = 'race');
END;
DROP TRIGGER rejection_counts;
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1, new.id FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1, latest = new.id;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;
DROP TRIGGER decision_counts;
CREATE TRIGGER decision_counts AFTER INSERT ON decision WHEN new.what = 'promoted' AND new.candidate IS NOT NULL BEGIN
  UPDATE standing SET promoted = 1 WHERE candidate = new.candidate;
  UPDATE tally SET promoted = promoted + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET promoted = promoted + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
END;

DROP INDEX measurement_by_candidate;
CREATE INDEX measurement_by_candidate ON measurement (candidate, problem, trial, us);
DROP INDEX standing_by_rank;
DROP INDEX standing_of_run;
CREATE INDEX standing_by_rank ON standing (problem, device, kind, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_run ON standing (run, problem, arm, grade DESC, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE INDEX standing_of_winners ON standing (device, problem, promoted DESC, grade DESC, us)
  WHERE won = 1 AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
