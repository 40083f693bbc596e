"""LangChain's agent, which runs on LangGraph, with the models of OpenAI and Anthropic."""

import world
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

MODELS = {
    "chat": lambda: ChatOpenAI(model=world.MODEL),
    "responses": lambda: ChatOpenAI(model=world.MODEL, use_responses_api=True),
    "messages": lambda: ChatAnthropic(model=world.MODEL),
}

agent = create_agent(MODELS[world.API](), tools=[world.look, world.write])
task = {"messages": [{"role": "user", "content": world.TASK}]}
if world.STREAMED:
    for message, _ in agent.stream(task, stream_mode="messages"):
        print(message.text, end="")
else:
    print(agent.invoke(task)["messages"][-1].text)
