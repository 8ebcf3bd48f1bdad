// Which tasks improved between epochs, and which have never been answered?
db.getCollection("audit_tasks").aggregate([
  { $match: { split: "train", $or: [{ change: { $gt: 0 } }, { always_wrong: true }] } },
  { $sort: { change: -1, task_id: 1 } },
  { $project: { query: 1, answer: 1, epochs: 1, mean_scores: 1, change: 1, best_score: 1, always_wrong: 1 } },
]).toArray();
